"""One data-parallel rank of a learner, as a process: MODEL OUT RANK COUNT RENDEZVOUS.

Makes two steps, writes the weights, and prints how many sockets it holds.
"""

import sys
from pathlib import Path

from callforest_mesh.trainer.batch import BatchMode, BatchOptions, plan_step
from callforest_mesh.trainer.learner.learner import Learner, LearnerOptions
from callforest_mesh.trainer.learner.ranks import RankOptions
from tests.integration.learner_cases import RATE, make_rows


def main() -> None:
    model_dir, out, rank, count, rendezvous = sys.argv[1:]
    ranks = RankOptions(int(rank), int(count), Path(rendezvous))
    learner = Learner(LearnerOptions(optimizer=RATE, ranks=ranks))
    learner.load(Path(model_dir))
    rows = make_rows(5)
    # Three microbatches for two ranks: one of them runs an empty one.
    plan = plan_step(rows, BatchOptions(BatchMode.FIXED, 2, rank_count=int(count)))
    for _ in range(2):
        metrics = learner.step(rows, plan)
    learner.export(Path(out))
    links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    sys.stdout.write(f"{sum('socket:' in link for link in links)} {metrics.gradient_norm!r}\n")


if __name__ == "__main__":
    main()
