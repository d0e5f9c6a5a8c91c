"""What two traces say about why a restart is not exact."""

from __future__ import annotations

from typing import Any

from lightning_ft._proof.traces import Difference, Record, differences
from lightning_ft.drill import diagnosis, unrestored


def step(batch: int, /, **values: Any) -> Record:
    names = {name.replace("_", " "): value for name, value in values.items()}
    return {"kind": "step", "key": [batch], "start": 1, "values": {"weights": "w", "random state": "r", **names}}


def validation(batch: int) -> Record:
    return {"kind": "validation", "key": [batch, 0, 0], "start": 1, "values": {"output": "v"}}


def diagnosed(expected: dict[int, list[Record]], actual: dict[int, list[Record]], resumed: int = 2) -> str:
    actual = {rank: [*expected[rank][:resumed], *records] for rank, records in actual.items()}
    found = [d for rank in expected for d in differences(expected[rank], actual[rank], rank)]
    first = diagnosis.first(found, expected)
    return f"{diagnosis.said(first)}; {diagnosis.cause_after_restart(found, first, expected, actual, resumed)}"


def test_the_rank_where_it_begins_is_named_though_all_ranks_follow() -> None:
    expected = {rank: [step(n, batch=f"r{rank}b{n}") for n in range(1, 5)] for rank in (0, 1)}
    actual = {0: [step(3, batch="r0b3", weights="x"), step(4, batch="r0b4", weights="x")]}
    actual[1] = [step(3, batch="r1b1", weights="x"), step(4, batch="r1b2", weights="x")]
    text = diagnosed(expected, actual)
    assert text.startswith("step 3 on rank 1: batch differs")
    assert text.endswith("batch 1 of the uninterrupted run was trained again")


def test_a_batch_of_another_rank_is_recognised() -> None:
    expected = {rank: [step(n, batch=f"r{rank}b{n}") for n in range(1, 5)] for rank in (0, 1)}
    actual = {0: [step(3, batch="r1b3")], 1: [step(3, batch="r0b3")]}
    assert "other parts of the data: this is the batch of rank 1" in diagnosed(expected, actual)


def test_of_unshuffled_epochs_the_nearest_batch_before_is_named() -> None:
    expected = {0: [step(n, batch=f"b{n % 4}") for n in range(1, 13)]}
    restarted_epoch = [step(n, batch=f"b{(n - 6) % 4}") for n in range(7, 13)]
    assert "batch 5 of the uninterrupted run was trained again" in diagnosed(expected, {0: restarted_epoch}, 6)
    ahead = [step(n, batch=f"b{(n + 1) % 4}") for n in range(3, 13)]
    assert "went on with batch 4" in diagnosed({0: expected[0][:4]}, {0: ahead[:2]}, 2)


def test_an_extra_validation_comes_before_what_follows_from_it() -> None:
    expected = {0: [step(n) for n in range(1, 5)]}
    actual = {0: [step(3), validation(3), step(4, random_state="x"), step(4, weights="x")]}
    text = diagnosed(expected, actual)
    assert text.startswith("the restarted run has validation at step 3")
    assert text.endswith("a validation was run that the uninterrupted run had not")


def test_what_the_killed_run_had_done_is_to_be_done_again() -> None:
    expected = [step(1), validation(1), step(2), validation(2), step(3), validation(3), step(4)]
    killed = [{**record, "start": 0} for record in expected[:5]]
    assert list(differences(expected, [*killed, *expected[2:]], 0)) == []
    assert list(differences(expected, [*killed, *expected[4:]], 0)) == []  # which went on after the validation
    (found,) = differences(expected, [*killed, *expected[2:3], *expected[4:]], 0)
    assert (found.kind, found.key, found.start) == ("missing", ("validation", 2, 0, 0), 1)
    text = diagnosis.cause_after_restart([found], found, {0: expected}, {}, 1)
    assert text == "a validation was left out after the restart"
    # Of a restart that was killed too, what it has come to.
    again = [{**record, "start": 2} for record in expected[4:]]
    assert list(differences(expected, [*killed, *expected[2:5], *again], 0)) == []
    (found,) = differences(expected, [*killed, *expected[2:3], *expected[4:5], *again], 0)
    assert (found.key, found.start) == (("validation", 2, 0, 0), 1)


def test_a_restart_that_finds_the_run_over_has_no_end_of_training() -> None:
    """Killed after its last save, and before the hooks of the end."""
    ends = [{"kind": "end", "key": [number], "start": 1, "values": {"weights": "w"}} for number in (0, 1)]
    expected = [step(1), step(2), *ends]
    killed = [{**record, "start": 0} for record in expected[:2]]
    assert list(differences(expected, [*killed, ends[1]], 0)) == []
    assert [d.key for d in differences(expected, [*killed, step(2), ends[1]], 0)] == [("end", 0)]
    assert [d.key for d in differences(expected, killed, 0)] == [("end", 0), ("end", 1)]


def test_counters_are_not_close_to_each_other() -> None:
    near, far = [{**step(1), "values": {"global step": n, "output": n / 2}} for n in (1, 2)]
    assert [d.name for d in differences([near], [far], 0, atol=5.0)] == ["global step"]


def test_a_restart_that_never_comes_to_its_end_is_told_from_one_that_loses_batches() -> None:
    expected = {0: [*(step(n) for n in (1, 2, 3)), {"kind": "end", "key": [1], "start": 1, "values": {"weights": "w"}}]}
    text = diagnosed(expected, {0: [step(3)]})
    assert text.startswith("the uninterrupted run has the end of the fit, the restarted run has not")
    assert "an error that the script catches" in text


def end_of_epoch(loss: str) -> Record:
    return {"kind": "epoch", "key": [0], "start": 1, "values": {"metrics": {"loss": loss}}}


def test_a_run_that_misses_its_end_is_not_taken_for_one_with_other_metrics() -> None:
    """The metrics of the epoch are those of more batches."""
    expected = {0: [step(1), step(2), step(3), validation(3), end_of_epoch("a")]}
    text = diagnosed(expected, {0: [step(3), validation(3), step(4), end_of_epoch("b")]})
    assert text.startswith("the restarted run has step 4, the uninterrupted run has not; batches were trained")
    assert text.endswith("or the end was missed")
    text = diagnosed(expected, {0: [step(3), {**validation(3), "values": {"output": "x"}}, step(4), end_of_epoch("b")]})
    assert text.startswith("validation at step 3, loader 0, batch 0: output differs")


def test_a_module_that_steps_by_a_counter_of_its_own_is_thought_of() -> None:
    expected = {0: [step(n, global_step=n // 3) for n in range(1, 5)]}
    text = diagnosed(expected, {0: [step(3, global_step=0, weights="x"), step(4, global_step=1, weights="x")]})
    assert text.startswith("step 3: global step differs")
    assert "in manual optimization the module decides when to step by something that is not saved" in text


def test_only_the_callbacks_that_differ_are_named() -> None:
    expected = {0: [step(n, callbacks={"A": "1", "B": "1"}) for n in (1, 2, 3)]}
    text = diagnosed(expected, {0: [step(3, callbacks={"A": "1", "B": "2"})]})
    assert text.startswith("step 3: callbacks differs: {'B': '1'} uninterrupted, {'B': '2'} restarted")


def test_with_three_ranks_the_order_of_ddps_sums_is_thought_of() -> None:
    for ranks in (2, 3):
        expected = {rank: [step(n, optimizer_state="o") for n in range(1, 5)] for rank in range(ranks)}
        changed = {rank: [step(3, optimizer_state="p", weights="x")] for rank in range(ranks)}
        text = diagnosed(expected, changed)
        assert text.startswith("step 3: weights differs")
        assert text.endswith("the state of the optimizer was dropped or changed on its way through the checkpoint")
        assert ("find_unused_parameters=True" in text) == (ranks == 3)


def test_values_are_written_for_people() -> None:
    long = "cc2abe0dc8bc34ff6be00051f4ba5e9d"
    expected = [step(3, output={"loss": (0.1).hex(), "other": long, "same": "s"})]
    actual = [step(3, output={"loss": (-1.5).hex(), "other": long[::-1], "same": "s"})]
    (found,) = differences(expected, actual, 0)
    text = (
        "step 3: output differs: {'loss': 0.1, 'other': 'cc2abe0d'} uninterrupted, {'loss': -1.5, 'other': 'd9e5ab4f'}"
    )
    assert diagnosis.said(found) == f"{text} restarted"


def test_a_backward_pass_that_is_not_deterministic_is_named() -> None:
    expected = {0: [step(1), step(2)]}
    found = list(differences(expected[0], [step(1, weights="x"), step(2)], 0))
    first = diagnosis.first(found, expected)
    assert diagnosis.said_of_fresh_runs(first) == "step 1: weights differs: w in one run, x in another"
    assert "the same batch and result gave other weights: a kernel" in diagnosis.cause_in_fresh_run(found, first)


def fresh(*names: str, batch: int = 1, **how: bool) -> str:
    """The cause, where two uninterrupted runs differ in these."""
    found = [Difference("value", ("step", batch), 0, name=name) for name in names]
    return diagnosis.cause_in_fresh_run(found, diagnosis.first(found, {0: [step(batch)]}), **how)


def test_who_has_seeded_is_not_told_to_seed() -> None:
    """Python's generator begins anew in every process without a seed, so that equal ones were seeded."""
    for text in (fresh("batch", "random state"), fresh("random state"), fresh("output", "random state")):
        assert "call seed_everything" in text
    assert "the global generators are seeded: the order of the data" in fresh("batch")
    assert "seed_everything was called: the order of the data" in fresh("batch", "random state", seeded=True)
    assert "seed_everything was called: something draws" in fresh("random state", seeded=True)
    for text in (fresh("batch"), fresh("batch", seeded=True), fresh("random state", seeded=True), fresh("output")):
        assert "call seed_everything" not in text


def test_weights_that_are_equal_at_first_are_not_suspected() -> None:
    assert "the weights are not initialised the same (seeded before the model is made" in fresh("output")
    assert "initialised" not in fresh("output", same_weights=True)
    assert "the same batch gave another result: a kernel" in fresh("output", same_weights=True)


def test_weights_that_were_restored_are_not_suspected() -> None:
    expected = {0: [step(n, output="o", optimizer_state="s") for n in range(1, 5)]}
    begun = {"weights": "w", "optimizer state": "s"}
    for at_first, suspected in ((begun, False), ({**begun, "weights": "x"}, True), ({}, True)):
        text = diagnosed(expected, {0: [{**step(3, output="p", optimizer_state="s"), "begun": at_first}]})
        assert "the module has state outside of its state_dict" in text
        assert ("weights or buffers were not restored" in text) == suspected


def with_attributes(record: Record, start: int = 0, **values: str) -> Record:
    return {**record, "start": start, "attributes": {f"Net.{name}": value for name, value in values.items()}}


def test_an_attribute_that_was_not_restored_is_named_and_no_clock() -> None:
    whole = [with_attributes(step(n, output="o"), level=str(n), clock=f"a{n}", same="1") for n in range(1, 5)]
    killed = [with_attributes(step(n, output="o"), level=str(n), clock=f"b{n}", same="1") for n in range(1, 4)]
    restarted = [with_attributes(step(n, output="p"), 1, level="0", clock=f"c{n}", same="1") for n in range(3, 5)]
    found = list(differences(whole, [*killed, *restarted], 0))
    first = diagnosis.first(found, {0: whole})
    text = diagnosis.cause_after_restart(found, first, {0: whole}, {0: [*killed, *restarted]}, 2)
    assert "; `Net.level` was 3 and is 0 after the restart: put it into state_dict" in text
    assert "clock" not in text
    assert "same" not in text.partition("`")[2]


def test_attributes_are_written_for_people() -> None:
    values = {"Net.avg": ("0.42741716456527523", "-1.0"), "Net.near": ("0.10000000000000001", "0.10000000000000002")}
    text = unrestored.said({**values, "Net.list": ("cc2abe0dc8bc34ff6be00051f4ba5e9d", "not there")})
    assert "`Net.avg` was 0.427417 and is -1.0 after the restart, " in text
    assert "`Net.near` was 0.10000000000000001 and is 0.10000000000000002 after" in text
    assert "`Net.list` was cc2abe0d and is not there after" in text


def test_numbers_within_the_tolerance_are_equal_also_those_that_are_none() -> None:
    expected = [step(1, weights=["0x1.0p+0", "nan"], metrics={"loss": 1.0})]
    actual = [step(1, weights=["0x1.0000001p+0", "nan"], metrics={"loss": 1.0})]
    assert list(differences(expected, actual, 0, atol=1e-6)) == []
    assert [d.name for d in differences(expected, actual, 0)] == ["weights"]
    assert [d.name for d in differences(expected, actual, 0, atol=1e-12)] == ["weights"]
