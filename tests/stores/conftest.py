from __future__ import annotations

from tests.stores.fixtures import chaos, poor_s3, proxy, rclone, s3, seaweed

__all__ = ["chaos", "poor_s3", "proxy", "rclone", "s3", "seaweed"]
