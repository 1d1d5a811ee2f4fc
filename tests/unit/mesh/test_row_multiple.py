"""What groups are padded to follows from how the trainer cuts batches (FIN-6)."""

from __future__ import annotations

import pytest

from callforest_core.forest.padding import padding_count
from callforest_mesh.chassis.configuration import load
from callforest_mesh.chassis.configuration_section import ConfigurationError
from callforest_mesh.mesh_options import finalizer_options
from callforest_mesh.trainer.batch import BatchOptions

pytestmark = pytest.mark.requirement("FIN-6", "CFG-1")

RANKS = "trainer.batch.rank_count"
ROWS = "trainer.batch.train_microbatch_size"
PACKED = "trainer.batch.mode=packed"
GIVEN = "finalizer.row_multiple"
ALONE = "services=[staging,ledger,admission,worker,finalizer,gateway]"


def multiple_of(*settings: str) -> int:
    return finalizer_options(load(environment={}, settings=settings)).row_multiple


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], BatchOptions().train_microbatch_size),
        ([f"{ROWS}=1"], 1),
        ([f"{RANKS}=4", f"{ROWS}=1"], 4),
        ([f"{RANKS}=4", f"{ROWS}=3"], 12),
        ([PACKED, f"{RANKS}=4", f"{ROWS}=3"], 4),
        ([PACKED], 1),
        ([f"{RANKS}=4", f"{ROWS}=1", f"{GIVEN}=4"], 4),
        ([ALONE], 1),
        ([ALONE, f"{GIVEN}=6"], 6),
        # The trainer runs elsewhere, and is configured in the file that all share.
        ([ALONE, f"{RANKS}=4", f"{ROWS}=2"], 8),
        (["services=[finalizer]", "trainer.groups_per_step=2"], 4),
        # What a training configuration says of any mesh configures no trainer.
        ([ALONE, f"{GIVEN}=8", "async_rl.rollout_failure.min_step_batch_fraction=0.5"], 8),
        ([ALONE, "async_rl.rollout_failure.min_step_batch_fraction=null"], 1),
    ],
)
def test_it_is_what_the_trainer_needs(settings: list[str], expected: int) -> None:
    assert multiple_of(*settings) == expected


def test_thirteen_rows_over_four_ranks_get_three_of_padding() -> None:
    """The worked example of the seed, from the configuration of its learner alone."""
    assert padding_count(13, multiple_of(f"{RANKS}=4", f"{ROWS}=1")) == 3
    assert padding_count(13, multiple_of(PACKED, f"{RANKS}=4")) == 3


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ([f"{GIVEN}=1"], GIVEN, "trainer.batch needs 4: 1 ranks, fixed batches of 4 rows"),
        ([f"{GIVEN}=8", f"{RANKS}=4", f"{ROWS}=1"], GIVEN, "is 8, but trainer.batch needs 4"),
        ([f"{GIVEN}=4", PACKED], GIVEN, "packed batches"),
        ([f"{GIVEN}=true", f"{ROWS}=1"], GIVEN, "is True"),
        ([ALONE, f"{GIVEN}=1", f"{RANKS}=2"], GIVEN, "needs 8"),
        ([f"{ROWS}=0"], "trainer.batch", "sizes must be positive: train_microbatch_size is 0"),
        ([f"{RANKS}=-1"], "trainer.batch", "rank_count is -1"),
        (["trainer.batch.mode=dynamic"], "trainer.batch.mode", "must be one of fixed, packed"),
        (["trainer.batch.ranks=2"], "trainer.batch.ranks", "did you mean 'rank_count'?"),
        (["trainer.batch=2"], "trainer.batch", "must be"),
        ([ALONE, f"{GIVEN}=0"], "finalizer", "row_multiple must be 1 to 4,096"),
        ([f"{RANKS}=4096"], "finalizer", "row_multiple must be 1 to 4,096"),
    ],
)
def test_what_contradicts_the_trainer_is_refused_with_the_reason(
    settings: list[str], key: str, words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        multiple_of(*settings)
    assert caught.value.key == key
    assert words in str(caught.value)
