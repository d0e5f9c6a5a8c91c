from __future__ import annotations

from tests.stores.fixtures import poor_s3, rclone, s3, seaweed

__all__ = ["poor_s3", "rclone", "s3", "seaweed"]
