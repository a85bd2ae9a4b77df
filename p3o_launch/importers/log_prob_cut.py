"""507: the denominator's log-probs and the trainer's are computed in micro-batches of different sizes."""

from __future__ import annotations

from p3o_launch.importers.configured import Tree

# Below it the difference was not seen.
SEEN_FROM_TP = 4


def log_prob_cut(tree: Tree, recomputing: str, training: str) -> None:
    """Report P3O507 where the sizes at the two paths differ; call it when the trainer recomputes the denominator.

    ``recomputing``, ``training``: settings that count the samples of one forward. Nothing is said when one is unknown.
    """
    recomputed, trained = tree.get(recomputing), tree.get(training)
    size = tree.draft.get("parallel.tensor_model_parallel_size")
    counts = (recomputed, trained, size)
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
        return
    if size < SEEN_FROM_TP or recomputed == trained:
        return
    assign = "=" if tree.draft.style == "override" else ": "
    tree.draft.report(
        "P3O507",
        tree.settings.place(recomputing) or tree.settings.place(training),
        f"{recomputing} ({recomputed}) differs from {training} ({trained}) with tensor parallelism over {size} ranks: "
        "the ratio of a policy that has not moved is not 1",
        f"set {recomputing}{assign}{trained}",
        "batch.micro_batch_size",
    )
