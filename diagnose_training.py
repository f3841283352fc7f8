"""Name the likely cause of the first difference between two runs, with the number that supports it.

compare_training.py, beside which this file lies, calls find_cause after a failed comparison.

A cause is a hypothesis that predicts the faulty tensor from the others: "the gradients were summed
instead of averaged" predicts dp_degree times the reference. It is named only if the prediction leaves
at most LEFT of the difference unexplained. If no hypothesis does, no cause is named. They are tried
from the particular to the general, in the order in which they stand below.

actual(rank) and reference(rank) return a rank's steps as compare_training.steps_of gives them: a list
with one dictionary of tensors by (kind, name) for each step, step 0 being the initial parameters.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from compare_training import Steps, ranges, wide

LEFT = 1e-3  # share of the difference that a named cause may leave unexplained, rounding apart
LEFT_BY_OTHER_STEP = 0.1  # for another step's batch: parameters have moved since
ROUNDING_EPS = 4.0  # norm-wise, between two right computations of one tensor
SAME_FACTOR = 1e-3  # relative deviation up to which a measured factor is taken for a known one


class Scene(NamedTuple):
    """The first difference, and everything a hypothesis may look at."""

    step: int
    kind: str
    name: str
    ranks: list[int]  # those that show it
    actual: Callable[[int], Steps]
    reference: Callable[[int], Steps] | None
    metadata: list[dict]  # by rank
    losses: list[list[tuple[float, float]]]  # by rank and step from 1: global and own loss

    def a(self, rank: int, kind: str = "", name: str = "", step: int | None = None) -> torch.Tensor | None:
        """Return a tensor of the actual run in float64, by default the one that differs."""
        return _pick(self.actual(rank), self, kind, name, step)

    def r(self, rank: int, kind: str = "", name: str = "", step: int | None = None) -> torch.Tensor | None:
        """Return a tensor of the reference as this rank sees it, None without a reference."""
        return _pick(self.reference(rank), self, kind, name, step) if self.reference else None

    def eps(self) -> float:
        """Return the eps of the parameters' dtype: rounding is of this size."""
        dtypes = [t.dtype for t in self.actual(0)[0].values() if t.is_floating_point()]
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def left(self, actual: torch.Tensor, predicted: torch.Tensor, reference: torch.Tensor) -> float:
        """Return which share of the difference between actual and reference a prediction leaves open.

        Rounding is not counted. Of a tensor that is smaller than the difference, its own norm counts: to
        be next to nothing is no explanation of a small tensor.
        """
        if actual.shape != predicted.shape or actual.shape != reference.shape:
            return float("inf")
        difference = min((actual - reference).norm().item(), actual.norm().item())
        rounding = ROUNDING_EPS * self.eps() * actual.norm().item()
        rest = max(0.0, (actual - predicted).norm().item() - rounding)
        return rest / difference if difference else float("inf")

    def same(self, s: float, known: float) -> bool:
        """Say whether a measured factor is a known one, but for rounding."""
        return abs(s - known) <= max(SAME_FACTOR, 2 * self.eps()) * abs(known)

    def degrees(self) -> list[int]:
        """Return the sizes of the mesh's dimensions and of the mesh, those above 1."""
        first = self.metadata[0]
        sizes = (first["dp_degree"], first["tp_degree"], first["world_size"])
        return [size for size in dict.fromkeys(sizes) if size > 1]


def _pick(steps: Steps, scene: Scene, kind: str, name: str, step: int | None) -> torch.Tensor | None:
    step = scene.step if step is None else step
    tensor = steps[step].get((kind or scene.kind, name or scene.name)) if 0 <= step < len(steps) else None
    return None if tensor is None else wide(tensor)


def find_cause(
    first: tuple[int, str, str],
    ranks: list[int],
    actual: Callable[[int], Steps],
    reference: Callable[[int], Steps] | None,
    metadata: list[dict],
    losses: list[list[tuple[float, float]]],
    invariant: bool = False,
) -> str | None:
    """Return the likely cause of the first difference in one line, None if nothing explains it.

    invariant: it is none from the reference, but breaks an invariant; the reference may agree.

    first: (step, kind, name) of the first tensor that differs, on these ranks. metadata: by rank.
    losses: by rank, (global loss, own loss) of each step.
    """
    scene = Scene(*first, ranks, actual, reference, metadata, losses)
    hypotheses = {
        "outputs": (
            not_finite,
            uneven_slices,
            other_samples,
            other_step,
            scaled,
            partial_sum,
            bias,
            dropped,
            rounded,
        ),
        "losses": (not_finite, own_loss, scaled, other_loss),
        "gradients": (
            *(
                no_gradient,
                not_finite,
                odd_ranks,
                not_reduced,
                accumulated,
                earlier_gradient,
                scaled,
                shards,
                rounded,
            ),
        ),
        "parameters": (not_finite, shards, other_start, scaled) if first[0] == 0 else (not_finite, update),
        "deltas": (no_gradient, not_finite, update),
    }
    if reference and not invariant and only_rounding(scene):
        return "rounding: the runs differ by no more than two right computations do, the tolerance is tighter"
    for hypothesis in hypotheses[first[1]]:
        for cause in hypothesis(scene):
            return cause
    # Outputs that the reference does not explain may still be those of another replica.
    without = scene._replace(reference=None)
    return next(other_samples(without), None) if first[1] == "outputs" and reference else None


# ---------------------------------------------------------------- measuring


def factor(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the s for which s * reference is nearest to actual."""
    square = reference.flatten().dot(reference.flatten()).item()
    return actual.flatten().dot(reference.flatten()).item() / square if square else 0.0


def correlation(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the correlation coefficient of the elements of two tensors."""
    a, r = actual.flatten() - actual.mean(), reference.flatten() - reference.mean()
    return (a.dot(r) / (a.norm() * r.norm()).clamp(min=1e-300)).item()


def unrelated(actual: torch.Tensor, reference: torch.Tensor) -> bool:
    """Say whether these are other random values of the same spread: another seed."""
    if reference.numel() < 64 or actual.shape != reference.shape or not reference.std() > 0:
        return False
    spread = (actual.std() / reference.std()).item()
    differ = ((actual - reference).abs() > 1e-3 * reference.std()).double().mean().item()
    bound = min(0.5, 4 / reference.numel() ** 0.5)
    return abs(correlation(actual, reference)) < bound and 0.8 < spread < 1.25 and differ > 0.9


def but(rest: float) -> str:
    """Return what a prediction leaves open, in words."""
    return f" but for {rest:.0e} of the difference" if rest else " but for rounding"


def numbered(word: str, numbers: list[int]) -> str:
    """Return "shard 2" or "shards 1-3"."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def are(things: list) -> str:
    """Return the verb that goes with one or several."""
    return "are" if len(things) > 1 else "is"


def who(scene: Scene) -> str:
    """Return which ranks show the difference, in words."""
    if len(scene.ranks) == len(scene.metadata):
        return "every rank" if len(scene.ranks) > 1 else "the rank"
    return numbered("rank", scene.ranks)


def meaning(s: float, scene: Scene, rank: int, every: bool = True) -> str | None:
    """Return what a factor says if it is a known one, None otherwise. every: all tensors have it."""
    first = scene.metadata[0]
    dp, tp, world = first["dp_degree"], first["tp_degree"], first["world_size"]
    output = scene.a(rank, "outputs", "output")
    known = []
    if dp > 1:
        known += [
            (dp, f"summed over the {dp} data-parallel replicas instead of averaged"),
            (1 / dp, f"divided by the {dp} data-parallel replicas once too often"),
            (1 / dp**2, f"divided by the {dp} data-parallel replicas twice too often"),
        ]
    if tp > 1:
        known += [
            (tp, f"summed over the {tp} tensor-parallel ranks once too often"),
            (1 / tp, f"divided by the {tp} tensor-parallel ranks, over which it must not be averaged"),
        ]
    if world not in (1, dp, tp):
        known += [
            (world, f"multiplied by the world size {world}"),
            (1 / world, f"divided by the world size {world}"),
        ]
    if scene.kind not in ("outputs", "losses") and every:
        known += [(2, "applied or accumulated twice"), (-1, "of the wrong sign")]
    if output is not None and every:
        known += [
            (output.numel(), f"summed over the {output.numel()} elements of the output instead of averaged"),
            (len(output) if output.dim() else 1, "summed over the samples instead of averaged"),
        ]
    texts = [text for value, text in known if value != 1 and scene.same(s, value)]
    power = torch.tensor(abs(s)).log2().round().item()
    if not texts and every and scene.kind == "gradients" and power >= 4 and scene.same(s, 2**power):
        texts = [f"a loss scale of {2**power:.0f} that was not removed"]
    return ", or ".join(dict.fromkeys(texts)) or None


def only_rounding(scene: Scene) -> bool:
    """Say whether the difference is so small that rounding explains it, and any prediction would."""
    for rank in scene.ranks:
        a, r = scene.a(rank), scene.r(rank)
        if a is None or r is None or a.shape != r.shape or not torch.isfinite(a).all():
            return False
        # A delta has the rounding of its parameter, of which right ones use a quarter of an eps.
        scale = scene.r(rank, "parameters") if scene.kind == "deltas" else ROUNDING_EPS * r
        if not (a - r).norm() <= scene.eps() * scale.norm():
            return False
    return True


# ---------------------------------------------------------------- hypotheses for any tensor


def not_finite(scene: Scene) -> Iterator[str]:
    """NaN or infinity appears here first."""
    for which, pick in (("reference", scene.r), ("actual run", scene.a)):
        tensor = pick(scene.ranks[0])
        if tensor is not None and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            yield (
                f"the first value that is not finite in the {which} is in {scene.kind} {scene.name} of step "
                f"{scene.step}, on {who(scene)}: {count} of {tensor.numel()} elements; everything before is "
                "finite"
            )


def scaled(scene: Scene) -> Iterator[str]:
    """A constant factor: summed instead of averaged, divided twice, clipped, ..."""
    if not scene.reference:
        return
    factors = []
    for rank in scene.ranks:
        a, r = scene.a(rank), scene.r(rank)
        if a is None or r is None or a.shape != r.shape or scene.left(a, factor(a, r) * r, r) > LEFT:
            return
        factors.append(factor(a, r))
    rank, s = scene.ranks[0], factors[0]
    if scene.same(s, 1.0):
        return
    if scene.a(rank).numel() == 1 and not meaning(s, scene, rank):
        return  # any number is a multiple of another
    if not all(scene.same(f, s) for f in factors):
        low, high = min(factors), max(factors)
        yield (
            f"{scene.kind} {scene.name} is the reference times a factor that each rank has for itself, "
            f"{low:.4g} to {high:.4g}: scaled by a norm or a count of the rank's own"
        )
        return
    names = [name for kind, name in scene.actual(rank)[scene.step] if kind == scene.kind]
    others = []
    for name in names:
        a, r = scene.a(rank, name=name), scene.r(rank, name=name)
        alike = a is not None and r is not None and scene.same(factor(a, r), s)
        others.append(alike and scene.left(a, s * r, r) <= LEFT)
    what = scene.kind if all(others) else f"{scene.kind} {scene.name}"
    text = f"{what} of {who(scene)} are {s:.2f}x the reference"
    text = text if abs(s - round(s, 2)) <= SAME_FACTOR * abs(s) else text.replace(f"{s:.2f}x", f"{s:.4g}x")
    explained = meaning(s, scene, rank, every=all(others))
    if explained:
        yield f"{text}: {explained}"
    elif scene.kind == "gradients" and all(others) and 0 < s < 1:
        norm = sum(scene.a(rank, name=name).norm().item() ** 2 for name in names) ** 0.5
        yield (
            f"{text}, all by the same factor: clipped to a total norm of {norm:.4g}, or scaled with the loss"
        )
    elif scene.kind != "gradients":
        yield f"{text}, a factor that is no degree of the mesh"


def shards(scene: Scene) -> Iterator[str]:
    """Equal parts of the tensor are permuted, repeated, zero, or each scaled by its own factor."""
    rank = scene.ranks[0]
    a, r = scene.a(rank), scene.r(rank)
    if a is None or r is None or a.shape != r.shape:
        return
    if a.dim() == 2 and a.shape[0] == a.shape[1] and scene.left(a, r.T, r) <= LEFT:
        yield (
            f"{scene.kind} {scene.name} is transposed (that leaves {scene.left(a, r.T, r):.0e} of the "
            "difference)"
        )
    for parts in scene.degrees():
        for dim in range(a.dim()):
            if a.shape[dim] % parts:
                continue
            ours, theirs = a.chunk(parts, dim), r.chunk(parts, dim)
            along = f"of the {parts} shards of {scene.kind} {scene.name} along dimension {dim}"
            # What two equal shards may differ by: rounding, and a little of the difference to explain.
            near = (LEFT * (a - r).norm() + ROUNDING_EPS * scene.eps() * r.norm()).item() / parts**0.5
            equal = [[(one - other).norm().item() <= near for other in theirs] for one in ours]
            match = [row.index(True) if any(row) else None for row in equal]
            own = [row[i] for i, row in enumerate(equal)]
            wrong = [i for i in range(parts) if not own[i]]
            if not wrong:
                return
            zero = [i for i in wrong if not ours[i].any()]
            if None not in match and sorted(match) == list(range(parts)):
                yield f"each {along} is another's, in the order {match}: gathered or cut in the wrong order"
            elif None not in match and len(set(match)) == 1:
                yield f"each {along} is the reference's shard {match[0]}: every rank holds the same shard"
            elif zero and zero == wrong and len(zero) < parts:
                yield (
                    f"{numbered('shard', zero)} {along} {are(zero)} zero, the others agree: it was never "
                    "filled"
                )
            elif None not in match and len(set(match)) < parts:
                yield (
                    f"each {along} is one of the reference's, in the order {match}: some twice, some missing"
                )
            elif scene.step == 0 and 0 < len(wrong) < parts:
                strange = torch.cat([ours[i].flatten() for i in wrong])
                known = torch.cat([theirs[i].flatten() for i in wrong])
                if unrelated(strange, known):
                    c, verb = correlation(strange, known), "start" if len(wrong) > 1 else "starts"
                    yield (
                        f"{numbered('shard', wrong)} {along} {verb} from other values (correlation {c:.2f} "
                        "with the reference), the others agree: another seed on the ranks that made it"
                    )
            else:
                factors = [factor(one, other) for one, other in zip(ours, theirs, strict=True)]
                pairs = zip(factors, ours, theirs, strict=True)
                rest = sum((one - s * other).norm().item() ** 2 for s, one, other in pairs) ** 0.5
                if rest <= LEFT * (a - r).norm().item() and max(factors) - min(factors) > SAME_FACTOR:
                    yield (
                        f"each {along} is the reference's times a factor of its own, {min(factors):.4g} to "
                        f"{max(factors):.4g}: scaled by a norm of the local shard"
                    )


def rounded(scene: Scene) -> Iterator[str]:
    """All values are exact in a narrower type: computed or reduced in it."""
    rank = scene.ranks[0]
    tensor = scene.actual(rank)[scene.step][scene.kind, scene.name]
    parameter = next(iter(scene.actual(rank)[0].values()))
    if tensor.dtype in (torch.bfloat16, torch.float16) and parameter.dtype != tensor.dtype:
        types = str(tensor.dtype).removeprefix("torch."), str(parameter.dtype).removeprefix("torch.")
        yield (
            f"{scene.kind} {scene.name}: all {tensor.numel()} values are of type {types[0]}, the parameters "
            f"of type {types[1]}: computed in {types[0]}, such as under autocast"
        )
    if tensor.dtype not in (torch.float32, torch.float64):
        return
    value = tensor[tensor != 0]
    other = scene.r(rank)
    if other is None and scene.kind == "parameters":
        other = scene.a(rank, step=0)
    for dtype in (torch.bfloat16, torch.float16):
        exact = (value.to(dtype).to(tensor.dtype) == value).double().mean().item() if len(value) else 0.0
        if exact == 1.0 and len(value) >= 16 and other is not None:
            theirs = other[other != 0].to(torch.float32)
            share = (theirs.to(dtype).float() == theirs).double().mean().item()
            if share < 0.5:
                name = str(dtype).removeprefix("torch.")
                yield (
                    f"{scene.kind} {scene.name}: all {len(value)} values are exact in {name}, of the "
                    f"reference's {share:.1%}: computed or reduced in {name}"
                )


# ---------------------------------------------------------------- before training


def other_start(scene: Scene) -> Iterator[str]:
    """The whole tensor starts from other random values, on some ranks or on all."""
    if scene.reference:
        pairs = [(scene.a(rank), scene.r(rank)) for rank in scene.ranks]
    else:
        pairs = [(scene.a(rank), scene.a(0)) for rank in scene.ranks]
    if all(unrelated(a, r) for a, r in pairs):
        worst = max((correlation(a, r) for a, r in pairs), key=abs)
        if len(scene.ranks) == len(scene.metadata):
            verb, why = "starts", "another seed, or a broadcast from a rank that has one"
        elif len(scene.ranks) == 1:
            verb, why = "starts", "a seed of its own, and no broadcast"
        else:
            verb, why = "start", "seeds of their own, and no broadcast"
        yield (
            f"{who(scene)} {verb} from other values of {scene.name} (correlation {worst:.2f} with the "
            f"expected, the same spread): {why}"
        )


# ---------------------------------------------------------------- outputs


def uneven_slices(scene: Scene) -> Iterator[str]:
    """Replicas have different numbers of samples."""
    outputs = [scene.a(rank) for rank in range(len(scene.metadata))]
    if not all(output.dim() for output in outputs):
        return
    rows = {m["dp_rank"]: len(output) for m, output in zip(scene.metadata, outputs, strict=True)}
    if len(set(rows.values())) > 1:
        yield (
            f"the replicas have {min(rows.values())} to {max(rows.values())} samples (replica 0 has "
            f"{rows[0]}): the slices are uneven, and a mean over replicas weighs them equally"
        )


def other_samples(scene: Scene) -> Iterator[str]:
    """A rank's outputs are those of other rows of the global batch."""
    dp = scene.metadata[0]["dp_degree"]
    if dp == 1 or not scene.a(0).dim():
        return
    firsts = {m["dp_rank"]: rank for rank, m in reversed(list(enumerate(scene.metadata)))}
    if not scene.reference:
        same = [k for k in range(1, dp) if torch.equal(scene.a(firsts[k]), scene.a(firsts[0]))]
        if same:
            yield (
                f"the outputs of replica 0 are also those of replica {ranges(same)}: they got the same "
                "samples"
            )
        return
    whole = torch.cat([rows_of(scene.r(firsts[k])) for k in range(dp)])
    rows = len(whole) // dp
    shifts = {}
    for k in range(dp):
        a, expected = rows_of(scene.a(firsts[k])), rows_of(scene.r(firsts[k]))
        if a.shape != expected.shape:
            return
        distance = torch.cdist(a, whole)
        near = distance <= LEFT * (a - expected).norm() / rows**0.5 + 1e-6 * expected.norm() / rows**0.5
        start = torch.arange(rows) + k * rows
        found = [d for d in range(-len(whole), len(whole)) if _fits(near, start + d)]
        shifts[k] = sorted(found, key=abs) if firsts[k] in scene.ranks else [0]
    # Rows may repeat in the data: if whole slices explain all replicas, they are meant, otherwise the
    # smallest shift.
    slices = {k: [d for d in found if d % rows == 0] for k, found in shifts.items()}
    shifts = {k: (slices if all(slices.values()) else shifts)[k][:1] or [None] for k in shifts}
    shifts = {k: found[0] for k, found in shifts.items()}
    if None in shifts.values() or not any(shifts.values()):
        return
    if all(shift % rows == 0 for shift in shifts.values()):
        slices = [k + shifts[k] // rows for k in range(dp)]
        if len(set(slices)) == 1:
            yield (
                f"every replica's outputs are those of slice {slices[0]} of the batch: all got the same slice"
            )
        else:
            yield (
                f"the outputs of the replicas are those of slices {slices}: slices are given to the wrong "
                "ranks"
            )
    else:
        k = next(k for k in range(dp) if shifts[k])
        s = shifts[k]
        yield (
            f"the outputs of replica {k} are those of rows {k * rows + s} to {k * rows + s + rows - 1} of "
            f"the batch, expected {k * rows} to {k * rows + rows - 1}: its slice is shifted by {s}, slices "
            "overlap"
        )


def rows_of(output: torch.Tensor) -> torch.Tensor:
    """Return an output with one row for each sample."""
    return output.reshape(len(output), -1)


def _fits(near: torch.Tensor, rows: torch.Tensor) -> bool:
    # Rows beyond either end of the batch have no counterpart to be held against; most must have one.
    inside = (rows >= 0) & (rows < near.shape[1])
    if inside.sum() * 2 < len(rows):
        return False
    return bool(near[torch.arange(len(rows))[inside], rows[inside]].all())


def other_step(scene: Scene) -> Iterator[str]:
    """The outputs are those of another step's batch."""
    rank = scene.ranks[0]
    a, r = scene.a(rank), scene.r(rank)
    if r is None:
        return
    steps = [step for step in range(1, len(scene.actual(rank))) if step != scene.step]
    distance = {step: scene.left(a, scene.r(rank, step=step), r) for step in steps}
    step = min(distance, key=distance.get, default=None)
    if step is not None and distance[step] <= LEFT_BY_OTHER_STEP:
        why = (
            "an earlier batch is used again, such as a constant captured in a compiled graph"
            if step < scene.step
            else "batches are read ahead by one step too many"
        )
        yield (
            f"the outputs of step {scene.step} are those of step {step}'s batch (they leave "
            f"{distance[step]:.1%} of the difference): {why}"
        )


def partial_sum(scene: Scene) -> Iterator[str]:
    """Tensor-parallel ranks hold terms of a sum that was never reduced."""
    rank, tp = scene.ranks[0], scene.metadata[0]["tp_degree"]
    r = scene.r(rank)
    if r is None or tp == 1:
        return
    replica = scene.metadata[rank]["dp_rank"]
    group = [i for i, m in enumerate(scene.metadata) if m["dp_rank"] == replica]
    if any(scene.a(i).shape != r.shape for i in group):
        return
    total = sum(scene.a(i) for i in group)
    if all(torch.equal(scene.a(i), scene.a(rank)) for i in group):
        return
    for name, value in [("", 0.0), *_vectors(scene, rank)]:
        if scene.left(scene.a(rank), scene.a(rank) + r - (total - (tp - 1) * value), r) <= LEFT:
            also = f" (with {name} in each of them)" if name else ""
            yield (
                f"each tensor-parallel rank has its own outputs, and their sum over the {tp} ranks{also} is "
                "the reference: the output was not reduced"
            )


def _vectors(scene: Scene, rank: int) -> list[tuple[str, torch.Tensor]]:
    # Parameters that could be a bias of the output, as they were in this step's forward.
    before = scene.reference(rank)[scene.step - 1]
    width = scene.r(rank).shape[-1:]
    vectors = [(n, wide(t)) for (k, n), t in before.items() if k == "parameters" and t.shape == width]
    return [(name, value) for name, value in vectors if len(value) > 1 and value.std() > 0]


def bias(scene: Scene) -> Iterator[str]:
    """A bias is added several times, or everything but the bias is scaled."""
    rank = scene.ranks[0]
    a, r = scene.a(rank), scene.r(rank)
    if r is None or a.shape != r.shape:
        return
    for name, value in _vectors(scene, rank):
        s = factor(a - r, value.expand_as(r))
        if abs(s) > SAME_FACTOR and scene.left(a, r + s * value, r) <= LEFT:
            whole = abs(s - round(s)) <= 0.01 and s > -1.5
            times = f"it is added {s + 1:.0f} times" if whole else "it is scaled"
            yield f"the outputs differ from the reference by {s:.2f} times {name}, in every row: {times}"
        s = factor(a - value, r - value)
        if scene.left(a, value + s * (r - value), r) <= LEFT:
            explained = meaning(s, scene, rank) or "reduced or scaled wrongly before the bias is added"
            yield f"apart from {name}, the outputs are {s:.2f}x the reference: {explained}"


def dropped(scene: Scene) -> Iterator[str]:
    """Elements are zero at random, the rest are scaled up: dropout on the output."""
    rank = scene.ranks[0]
    a, r = scene.a(rank), scene.r(rank)
    if r is None or a.shape != r.shape:
        return
    kept = a != 0
    share = (~kept & (r != 0)).double().mean().item()
    if 0 < share < 1:
        s = factor(a[kept], r[kept])
        if scene.left(a, s * r * kept, r) <= LEFT and abs(s * (1 - share) - 1) <= 0.05:
            yield f"{share:.1%} of the outputs are zero and the rest {s:.3f}x the reference: dropout is on"


# ---------------------------------------------------------------- losses


def own_loss(scene: Scene) -> Iterator[str]:
    """Each rank reports its own loss as the global one."""
    step = scene.step - 1
    pairs = [losses[step] for losses in scene.losses]
    same = all(abs(loss - own) <= 1e-6 * abs(own) for loss, own in pairs)
    owns = {m["dp_rank"]: own for m, (_, own) in zip(scene.metadata, pairs, strict=True)}
    mean = sum(owns.values()) / len(owns)
    expected = scene.r(scene.ranks[0])
    right = expected is None or abs(mean - expected.item()) <= 1e-5 * abs(mean)
    if same and len(owns) > 1 and right and max(owns.values()) > min(owns.values()):
        known = "" if expected is None else ", which is the reference"
        yield (
            f"the losses are each replica's own, {min(owns.values()):.6g} to {max(owns.values()):.6g}: they "
            f"were not averaged over the {len(owns)} replicas (their mean is {mean:.6g}{known})"
        )


def other_loss(scene: Scene) -> Iterator[str]:
    """The outputs agree, so the loss was averaged wrongly, or the target or the loss function is another."""
    rank = scene.ranks[0]
    expected = scene.r(rank)
    if expected is None:
        return
    owns = {
        m["dp_rank"]: losses[scene.step - 1][1]
        for m, losses in zip(scene.metadata, scene.losses, strict=True)
    }
    mean, right = sum(owns.values()) / len(owns), expected.item()
    if abs(mean - right) <= 1e-5 * abs(right):
        yield (
            f"the mean of the {len(owns)} replicas' own losses is the reference, {mean:.6g}, but on "
            f"{who(scene)} the global loss is {scene.a(rank).item():.6g}: averaged over other ranks, or "
            "changed later"
        )
        return
    outputs, theirs = scene.a(rank, "outputs", "output"), scene.r(rank, "outputs", "output")
    if outputs.shape != theirs.shape:
        return
    error = ((outputs - theirs).norm() / theirs.norm()).item()
    off = abs(scene.a(rank).item() / right - 1) if right else float("inf")
    if error < 0.01 * off:
        yield (
            f"the outputs agree to {error:.1e}, but the loss is off by {off:.2%}: the target, or the loss "
            "function, is another"
        )


# ---------------------------------------------------------------- gradients


def no_gradient(scene: Scene) -> Iterator[str]:
    """The parameter is frozen."""
    rank = scene.ranks[0]
    if scene.a(rank) is not None:
        return
    steps, expected = scene.actual(rank), (scene.reference or scene.actual)(0)
    names = [
        name for kind, name in expected[1] if kind == "parameters" and ("gradients", name) in expected[1]
    ]
    absent = [name for name in names if ("gradients", name) not in steps[scene.step]]
    if not absent:
        return
    count = sum(("gradients", absent[0]) not in tensors for tensors in steps[1:])
    keys = [("parameters", name) for name in absent]
    moved = [
        name
        for _, name in keys
        if not torch.equal(steps[0]["parameters", name], steps[-1]["parameters", name])
    ]
    what = f"yet {', '.join(moved)} change" if moved else "and the values do not change"
    yield (
        f"{who(scene)}: no gradient of {', '.join(absent)} in {count} of {len(steps) - 1} steps, {what}: "
        "frozen (requires_grad is False)"
    )


def odd_ranks(scene: Scene) -> Iterator[str]:
    """Most ranks have the right gradients: it is no mistake of the plan."""
    others = len(scene.metadata) - len(scene.ranks)
    if not scene.reference or others <= len(scene.ranks):
        return
    a, r = scene.a(scene.ranks[0]), scene.r(scene.ranks[0])
    if a is None or r is None or a.shape != r.shape:
        return
    count = int(((a - r).abs() > 16 * scene.eps() * r.abs().max()).sum())
    yield (
        f"gradients {scene.name} are wrong on {who(scene)} alone, in {count} of {a.numel()} elements, and "
        f"right on the other {others}: not the plan, but something that happened there"
    )


def not_reduced(scene: Scene) -> Iterator[str]:
    """Ranks hold different gradients, whose mean is right: no reduction, or over a smaller group."""
    everyone = range(len(scene.metadata))
    tensors = [scene.a(rank) for rank in everyone]
    if any(tensor is None for tensor in tensors):
        return
    groups: list[list[int]] = []
    for rank in everyone:
        for group in groups:
            if (tensors[rank] - tensors[group[0]]).norm() <= 1e-4 * tensors[rank].norm():
                group.append(rank)
                break
        else:
            groups.append([rank])
    if len(groups) == 1:
        return
    listed = " ".join("{" + ranges(group) + "}" for group in groups[:8]) + (" ..." if len(groups) > 8 else "")
    r = scene.r(scene.ranks[0])
    what = f"gradients {scene.name}"
    alone = all(len(group) == scene.metadata[0]["tp_degree"] for group in groups)
    alone = alone and len(groups) == scene.metadata[0]["dp_degree"]
    how = (
        f"each of the {len(groups)} replicas has its own {what}"
        if alone
        else f"{what} agree only within the groups of ranks {listed}"
    )
    if r is None:
        odd = sorted(groups, key=len)[:-1]
        if len(groups) == 2 and len(odd[0]) * 2 < len(tensors):
            yield f"{what} of {numbered('rank', odd[0])} differ from those of all other ranks, which agree"
        else:
            yield f"{how}: not reduced over all replicas"
        return
    rank = scene.ranks[0]
    for text, total in (("mean", sum(tensors) / len(tensors)), ("sum", sum(tensors))):
        rest = scene.left(tensors[rank], tensors[rank] + r - total, r)
        if rest <= LEFT:
            wrong = "not reduced" if alone else "reduced over the wrong group"
            yield f"{how}, and their {text} over all ranks is the reference{but(rest)}: {wrong}"
    mean = sum(tensors) / len(tensors)
    s = factor(mean, r)
    if scene.left(mean, s * r, r) <= LEFT and meaning(s, scene, rank):
        yield (
            f"{how}, and their mean over all ranks is {s:.2f}x the reference: {meaning(s, scene, rank)}, "
            "and at least once not reduced"
        )


def accumulated(scene: Scene) -> Iterator[str]:
    """Gradients of the step before were not cleared."""
    rank = scene.ranks[0]
    a, r, before = scene.a(rank), scene.r(rank), scene.a(rank, step=scene.step - 1)
    if r is not None and before is not None:
        rest = scene.left(a, r + before, r)
        if rest <= LEFT:
            yield (
                f"gradients of step {scene.step} are the reference plus those of step "
                f"{scene.step - 1}{but(rest)}: they were not cleared by zero_grad"
            )


def earlier_gradient(scene: Scene) -> Iterator[str]:
    """The gradients are those of the step before."""
    rank = scene.ranks[0]
    a, r, before = scene.a(rank), scene.r(rank), scene.a(rank, step=scene.step - 1)
    if r is not None and before is not None:
        rest = scene.left(a, before, r)
        if rest <= LEFT:
            yield f"gradients of step {scene.step} are those of step {scene.step - 1}{but(rest)}: stale"


# ---------------------------------------------------------------- updates


def update(scene: Scene) -> Iterator[str]:
    """The gradients agree and the update does not: learning rate, momentum, weight decay, skipped, ..."""
    rank, first = scene.ranks[0], scene.metadata[0]
    delta, gradient = scene.a(rank, "deltas"), scene.a(rank, "gradients")
    if delta is None or gradient is None:
        yield from no_gradient(scene._replace(kind="gradients"))
        return
    steps = scene.actual(rank)
    if not delta.any():
        names = [name for kind, name in steps[scene.step] if kind == "deltas"]
        still = [name for name in names if not scene.a(rank, "deltas", name).any()]
        count = sum(not scene.a(rank, "deltas", step=step).any() for step in range(1, len(steps)))
        what = f"{', '.join(still)} of {who(scene)} {'do' if len(still) > 1 else 'does'} not change"
        if count == len(steps) - 1:
            yield (
                f"{what} in any of {count} steps, though the gradient is not zero: not updated by the "
                "optimizer"
            )
        else:
            yield f"{what} in step {scene.step}, though the gradient is not zero: the update was skipped"
        return
    yield from rounded(scene._replace(kind="parameters"))
    if first["optimizer"] != "SGD":
        expected, of = scene.r(rank, "deltas"), "the reference's"
    else:
        expected, of = -first["learning_rate"] * gradient, "-learning rate x gradient"
    if expected is None:
        return
    before = scene.a(rank, "parameters", step=scene.step - 1)
    # A delta is the difference of rounded parameters: this much of it is rounding.
    noise = torch.finfo(steps[scene.step]["deltas", scene.name].dtype).eps * before.norm().item()
    difference = (delta - expected).norm().item()
    if difference <= 10 * noise:
        return

    def explains(prediction):
        return prediction is not None and (delta - prediction).norm().item() <= LEFT * difference + noise

    s = factor(delta, expected)
    if explains(s * expected):
        text = f"the update of {scene.name} on {who(scene)} is {s:.4g}x {of}"
        rate = first["learning_rate"]
        known = meaning(s, scene, rank)
        world = first["world_size"]
        if world > 1 and abs(s / world - 1) <= 10 * SAME_FACTOR:
            known = f"scaled by the world size {world}"
        elif known and abs(s - 2) > 10 * SAME_FACTOR:
            known = None
        yield f"{text}: the learning rate acts as {s * rate:.4g}, not {rate:g}" + (
            f", {known}" if known else ""
        )
        return
    if scene.step > 1:
        earlier = scene.a(rank, "deltas", step=scene.step - 1)
        stale = scene.a(rank, "gradients", step=scene.step - 1)
        if earlier is None or stale is None:
            return
        if first["optimizer"] == "SGD" and explains(-first["learning_rate"] * stale):
            yield (
                f"the update of step {scene.step} is -learning rate x the gradient of step "
                f"{scene.step - 1}: the step is taken before the gradient has arrived"
            )
            return
        momentum = factor(delta - expected, earlier)
        if 0 < momentum <= 1 and explains(expected + momentum * earlier):
            yield (
                f"the update is {of} plus {momentum:.3f} times the last update: momentum {momentum:.2f} is on"
            )
            return
    decay = factor(delta - expected, -first["learning_rate"] * before)
    if decay > 0 and explains(expected - decay * first["learning_rate"] * before):
        yield (
            f"the update is {of} minus {decay:.3g} x learning rate x parameter: weight decay {decay:.2g} is "
            "on"
        )
        return
    size = delta.abs()
    # Of the delta's rounding, an element may have the whole, the norm has a share.
    strange = (delta - expected).abs() > 4 * torch.finfo(
        steps[0]["parameters", scene.name].dtype
    ).eps * before.abs().max()
    count = int(strange.sum())
    if 0 < count * 1000 < strange.numel():
        index = tuple(torch.nonzero(strange)[0].tolist())
        after = scene.a(rank, "parameters")[index].item()
        yield (
            f"{count} of {strange.numel()} elements of {scene.name} on {who(scene)} do not follow {of}: "
            f"{list(index)} went from {before[index].item():.6g} to {after:.6g}, not by the optimizer: "
            "memory was changed"
        )
        return
    even = (size.std() / size.mean()).item() if size.numel() > 1 else 1.0
    if even < 0.1:
        yield (
            f"every element of {scene.name} moves by about {size.mean():.3g}, whatever its gradient: an "
            "optimizer such as Adam, not plain SGD"
        )
