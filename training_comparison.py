"""Two runs, rank by rank: every tensor of the one against the other's, and the invariants of both."""

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch

from training_diagnosis import find_cause
from training_invariants import InvariantChecks
from training_records import (
    KINDS,
    LOSS,
    OUTPUT,
    PARAMETER_KINDS,
    Finding,
    InputError,
    Key,
    Place,
    Run,
    Steps,
    Tensors,
    check_same_parameters,
    may_be_tied,
    optimizer_of,
    place_of,
    slacks_of,
)
from training_tolerance import (
    DEFAULTS,
    NORM_EPS,
    NOTHING_MORE,
    Allowance,
    Result,
    Tolerance,
    adaptive_slacks,
    allow_movement,
    allow_rounding_of,
    allow_share,
    allow_slack,
    compare_tensor,
    eps_of,
    largest,
    mismatch,
    other_type,
    relative_error,
    share_of_rounding,
    unit_of,
    wide,
)

SAME_SAMPLE = 1e-3  # norm of the difference of two outputs of one sample, over its norm


class Comparison:
    """Compare a run with a reference; both give their ranks one after another."""

    def __init__(self, tolerance: Tolerance, any_type: bool) -> None:
        """any_type: the reference may be of other dtypes, as the oracle's float64 is."""
        self.tolerance, self.any_type = tolerance, any_type
        self.notes: list[str] = []  # what is to be known, and no mistake
        self.findings: list[Finding] = []
        self.results: dict[Key, list[tuple[int, int, Result]]] = defaultdict(list)  # (rank, step, result)
        self.scores: list[list[float]] = []  # by rank and step: worst error as a share of what is allowed
        # The first pair at each place, with its result: most ranks have the same two tensors again.
        self._known: dict[Place, tuple[torch.Tensor | None, torch.Tensor | None, Result]] = {}

    def add(
        self,
        metadata: dict,
        reference: Steps,
        actual: Steps,
        slacks: list[Tensors],
        drifts: list[float] | None = None,
    ) -> None:
        """Compare a rank. slacks, drifts: by step, what is allowed in addition, see all_slacks."""
        rank, replica = metadata["rank"], metadata["dp_rank"]
        self.scores.append([])
        unit = unit_of(actual, reference)
        for step, slack in enumerate(slacks):
            worst, drift = 0.0, drifts[step] if drifts else 0.0
            for key in reference[step] | actual[step]:
                pair = actual[step].get(key), reference[step].get(key)
                place = place_of(step, key, replica)
                known = self._known.get(place)
                if known and pair[0] is known[0] and pair[1] is known[1]:
                    result = known[2]
                else:
                    on_top = allowance_of(key, reference[step], reference[0], slack, unit, pair)
                    if drift and key[0] in ("outputs", "gradients") and pair[1] is not None:
                        on_top = allow_share(on_top, pair[1], drift)
                    result = self._compare(key, *pair, unit, on_top)
                    self._known.setdefault(place, (*pair, result))
                self.results[key].append((rank, step, result))
                worst = max(worst, result.score)
                if not result.passed:
                    self.findings.append(Finding(step, rank, *key, "reference", result.message))
            self.scores[-1].append(worst)

    def by_kind(self) -> dict[str, list[Result]]:
        """Return the results of each kind of tensor."""
        kinds = {kind: [] for kind in KINDS}
        for (kind, _), results in self.results.items():
            kinds[kind] += [result for _, _, result in results]
        return kinds

    def _compare(
        self,
        key: Key,
        actual: torch.Tensor | None,
        reference: torch.Tensor | None,
        unit: float,
        on_top: Allowance,
    ) -> Result:
        if actual is None or reference is None:
            run = "reference" if reference is None else "actual"
            why = "the parameter is frozen there, or left out"
            if key in (OUTPUT, LOSS):
                why = "the script returned none"
            elif key[0] == "parameters":
                why = "tied to another parameter there, or left out"
            return mismatch(f": there is none in the {run} run: {why}")
        if not self.any_type and (problem := other_type(actual, reference)):
            return mismatch(problem)
        kind, _ = key
        if kind == "losses":  # Python floats, which scripts compute in float32 or a coarser type
            unit = max(unit, torch.finfo(torch.float32).eps)
        if kind == "parameters":  # the unit is for their movement: see allow_movement
            unit = eps_of(actual, reference)
        return compare_tensor(actual, reference, self.tolerance, unit, on_top)


def allowance_of(
    key: Key,
    references: Tensors,
    initial: Tensors,
    slack: Tensors,
    unit: float,
    pair: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Allowance:
    """Return what is allowed of a tensor in addition to the tolerance.

    references, initial: the reference's tensors of this step and of step 0. pair: actual, reference.
    """
    kind, name = key
    actual, reference = pair
    if kind not in PARAMETER_KINDS or actual is None or reference is None:
        return NOTHING_MORE
    eps = eps_of(actual, reference)
    on_top = NOTHING_MORE
    if kind == "deltas":
        on_top = allow_rounding_of(references["parameters", name], eps)
    if kind == "parameters":
        on_top = allow_movement(reference, initial[key], unit if eps else 0.0)  # whole numbers must be equal
    # A parameter as small as a negligible delta is made of such deltas.
    floor = share_of_rounding(unit) * largest(references, "gradients" if kind == "gradients" else "deltas")
    return allow_slack(on_top._replace(floor=floor), slack.get(key))


def all_slacks(
    reference: Run, oracle: Run | None, steps: dict[str, Steps]
) -> tuple[list[Tensors], list[float]]:
    """Return by step what is allowed in addition of each element: by the oracle, and of Adam's updates.

    Also by which share outputs and gradients may differ. steps: of the first rank, by run.
    """
    whole = oracle or (reference if reference.whole else None)
    pair = steps["reference"], steps["actual"]
    slacks, drifts = adaptive_slacks(reference.first, *pair, unit_of(*reversed(pair)))
    for slack, of_oracle in zip(slacks, slacks_of(whole.first) if whole else [], strict=False):
        for key, tensor in of_oracle.items():
            slack[key] = slack.get(key, 0.0) + tensor
    return slacks, drifts


class Outcome(NamedTuple):
    """What compare_runs found."""

    comparison: Comparison | None  # None without a reference
    checks: list[InvariantChecks]  # of the actual run and, if there is one, of the reference
    against_oracle: list[Comparison]  # of the reference and the actual run, if there is an oracle
    losses: list[dict[str, float | None]]  # by step, of rank 0 in each run
    findings: list[Finding]  # in causal order
    order: dict[Key, int] = {}  # of the tensors in a step


def compare_runs(
    reference: Run | None,
    actual: Run,
    oracle: Run | None = None,
    tolerance: Tolerance = DEFAULTS,
    progress: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Compare all ranks, holding at most two of a run in memory. Raises InputError."""
    checks = [InvariantChecks("actual", actual.metadata, tolerance)]
    if reference:
        checks.append(InvariantChecks("reference", reference.metadata, tolerance))
    comparison = Comparison(tolerance, any_type=reference.whole) if reference else None
    against_oracle = [Comparison(tolerance, any_type=True) for _ in range(2)] if oracle else []
    slacks, drifts = [], []
    if reference and (note := deal(reference, actual)):
        comparison.notes.append(note)
        checks[0].uneven = True
    losses = [{} for _ in range(actual.metadata["steps"])]
    order: dict[Key, int] = {}
    for rank in range(actual.world_size):
        progress(f"comparing rank {rank} of {actual.world_size}")
        content = actual.rank(rank)
        metadata = content["metadata"]
        steps = {"actual": actual.steps(rank, metadata)}
        checks[0].add(content, steps["actual"])
        if reference:
            steps["reference"] = reference.steps(rank, metadata)
            names = "the reference", f"rank {rank} of the actual run"
            pair = steps["reference"], steps["actual"]
            check_same_parameters(*pair, names, may_be_tied(*pair))
            check_reference_rank(checks[1], reference, metadata, steps["reference"])
            if rank == 0:
                slacks, drifts = all_slacks(reference, oracle, steps)
            comparison.add(metadata, steps["reference"], steps["actual"], slacks, drifts)
        if oracle:
            steps["oracle"] = oracle.steps(rank, metadata)
            check_same_parameters(steps["oracle"], steps["actual"], ("the oracle", f"rank {rank}"))
            for one, name in zip(against_oracle, ("reference", "actual"), strict=True):
                one.add(metadata, steps["oracle"], steps[name], slacks, drifts)
        if rank == 0:
            order = {key: place for place, key in enumerate(steps.get("reference", steps["actual"])[1])}
            for name, of_run in steps.items():
                for step, tensors in enumerate(of_run[1:]):
                    losses[step][name] = tensors[LOSS].item() if LOSS in tensors else None
    progress("")
    check_replicas(checks[0], actual)
    # Unused in both runs is no mistake. With one run nobody knows.
    unused = checks[0].unused & checks[1].unused if reference else set()
    findings = [finding for check in checks for finding in check.finish(unused)]
    findings += comparison.findings if comparison else []
    return Outcome(comparison, checks, against_oracle, losses, in_causal_order(findings, order))


def deal(reference: Run, actual: Run) -> str | None:
    """Deal the samples of a whole reference to replicas as the actual run did; return how, in words.

    Equal slices in the order of the batch need nothing, and are not looked for any further. Otherwise each
    sample is known by its output: a sampler may deal them in turn, replicas may have other numbers of
    them, the batch may be the second dimension. Nothing is dealt unless each sample is found; if replicas
    have each other's slices, which no sampler does; and if uneven slices give another loss than the batch.
    """
    replicas = actual.metadata["dp_degree"]
    if not reference.whole or replicas == 1 or in_equal_slices(reference, actual):
        return None
    outputs: dict[int, list[torch.Tensor | None]] = {}  # by replica, of each step
    for rank in range(actual.world_size):
        content = actual.rank(rank)
        if content["metadata"]["dp_rank"] not in outputs:
            outputs[content["metadata"]["dp_rank"]] = [record["output"] for record in content["records"]]
    if len(outputs) < replicas:
        return None
    found = []
    for step, record in enumerate(reference.first["records"], start=1):
        parts = [outputs[replica][step - 1] for replica in sorted(outputs)]
        dealt = deal_output(record["output"], parts)
        if dealt and may_be_dealt(dealt[1], record, actual.first["records"][step - 1]):
            reference.dealt[step], rows = dealt
            found.append((step, rows))
    if not found:
        return None
    step, first = next((one for one in found if len(set(map(len, one[1]))) > 1), found[0])
    order = [sample for samples in first for sample in samples]
    if order == sorted(order):
        sizes = ", ".join(str(len(samples)) for samples in first)
        return f"the replicas have {sizes} of the reference's samples in step {step}, in its order"
    shown = ", ".join(map(str, first[0][:4])) + (", ..." if len(first[0]) > 4 else "")
    return f"the replicas have the reference's samples in another order: replica 0 has {shown} in step {step}"


def assign(fitting: list[list[int]], sizes: list[int]) -> list[list[int]]:
    """Return which sample each row of each replica is, each at most once.

    fitting: for each row the samples that it may be; there are several where samples repeat. Then the one
    behind the last row's is meant, or the first of a slice.
    """
    found, taken, start = [], set(), 0
    for size in sizes:
        rows: list[int] = []
        for row in range(start, start + size):
            free = [sample for sample in fitting[row] if sample not in taken]
            wanted = [one for one in free if (one == rows[-1] + 1 if rows else one % size == 0)]
            rows += (wanted or free)[:1]
            taken.update(rows[-1:])
        found.append(rows)
        start += size
    return found


def may_be_dealt(rows: list[list[int]], reference: dict, actual: dict) -> bool:
    """Say whether these samples of replicas are one of the ways to deal them, given both runs' records."""
    sizes = {len(samples) for samples in rows}
    slices = all(samples == list(range(samples[0], samples[0] + len(samples))) for samples in rows if samples)
    if len(sizes) == 1:
        return not slices or rows == sorted(rows)
    divides = sum(map(len, rows)) % len(rows) == 0  # otherwise there is no other way to compare
    losses = reference["loss"], actual["loss"]
    eps = max(eps_of(actual["output"]), 2.0**-23)
    agree = None in losses or abs(losses[1] - losses[0]) <= NORM_EPS * eps * abs(losses[0])
    return agree or not divides


def in_equal_slices(reference: Run, actual: Run) -> bool:
    """Say whether rank 0 has the first of equal slices of each batch, as its first output tells."""
    replicas = actual.metadata["dp_degree"]
    pairs = [
        [record["output"] for record in step]
        for step in zip(reference.first["records"], actual.first["records"], strict=True)
    ]
    pairs = [(whole, own) for whole, own in pairs if whole is not None and own is not None and own.dim()]
    if any(whole.shape != (len(own) * replicas, *own.shape[1:]) for whole, own in pairs):
        return False
    if not pairs:
        return True
    whole, own = pairs[0]
    return relative_error(own, whole[: len(own)]) < SAME_SAMPLE


def deal_output(
    whole: torch.Tensor | None, parts: list[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[list[int]]] | None:
    """Return for each replica the samples of the whole output that it has, and which these are.

    None unless each sample of the whole is one of one replica.
    """
    if whole is None or any(part is None or part.dim() != whole.dim() or not part.dim() for part in parts):
        return None
    dims = [dim for dim in range(whole.dim()) if sum(part.shape[dim] for part in parts) == whole.shape[dim]]
    for dim in dims:
        others = [part.shape[:dim] + part.shape[dim + 1 :] for part in (whole, *parts)]
        if len(set(others)) > 1:
            continue
        theirs = wide(whole.movedim(dim, 0)).flatten(1)
        ours = torch.cat([wide(part.movedim(dim, 0)).flatten(1) for part in parts])
        near = torch.cdist(ours, theirs) <= SAME_SAMPLE * theirs.norm(dim=1)
        sizes = [part.shape[dim] for part in parts]
        by_replica = assign([row.nonzero().flatten().tolist() for row in near], sizes)
        if sum(map(len, by_replica)) == len(theirs):
            return [whole.index_select(dim, torch.tensor(part)) for part in by_replica], by_replica
    return None


def check_reference_rank(checks: InvariantChecks, reference: Run, like: dict, steps: Steps) -> None:
    """Check a rank of the reference, whose place in the mesh has to be that of the actual run's rank.

    Of a run of one rank there is one rank to check, whole, and no mesh. Raises InputError.
    """
    rank = like["rank"]
    if reference.whole:
        if rank == 0:
            content = reference.first
            checks.add(content, reference.steps(0, content["metadata"]))
        return
    content = reference.rank(rank)
    for key in ("dp_rank", "tp_rank"):
        if content["metadata"][key] != like[key]:
            raise InputError(
                f"rank {rank} has {key} {content['metadata'][key]} in the reference, {like[key]} in the "
                "actual run; run both on the same mesh"
            )
    checks.add(content, steps)


def check_replicas(checks: InvariantChecks, run: Run) -> None:
    """Raise InputError unless the ranks of a run name as many data-parallel replicas as there are."""
    replicas = len({replica for replica, _ in checks.losses})
    if replicas != run.metadata["dp_degree"]:
        raise InputError(
            f"the ranks of {run.directory} name {replicas} data-parallel replicas, dp_degree is "
            f"{run.metadata['dp_degree']}; save each rank's own dp_rank"
        )


def in_causal_order(findings: list[Finding], order: dict[Key, int]) -> list[Finding]:
    """Return findings by step, then as a record holds its tensors, then by rank.

    Of one tensor, the comparison with the reference comes before the invariants.
    """

    def place(finding: Finding) -> tuple:
        tensor = order.get((finding.kind, finding.name), len(order))
        return finding.step, tensor, finding.rank, finding.check != "reference", finding.check

    return sorted(findings, key=place)


def cause_of(outcome: Outcome, reference: Run | None, actual: Run) -> str | None:
    """Return the likely cause of the first finding in plain words, None if nothing explains it."""

    def steps_by_rank(run: Run) -> Callable[[int], Steps]:
        opened = {}

        def steps(rank: int) -> Steps:
            if rank not in opened:
                opened[rank] = run.steps(rank, actual.rank(rank)["metadata"])
            return opened[rank]

        return steps

    first = outcome.findings[0]

    def metadata(rank: int) -> dict:
        # The optimizer is that which should have updated this tensor; "own_optimizer" is what the rank had.
        right = reference if reference and first.check == "reference" else actual
        own, (kind, rate) = (
            optimizer_of(run.rank(rank), max(first.step, 1), first.name) for run in (actual, right)
        )
        of_rank = actual.rank(rank)["metadata"]
        return {**of_rank, "optimizer": kind, "learning_rate": rate, "own_optimizer": own[0]}

    try:
        return find_cause(
            (first.step, first.kind, first.name),
            ranks_of(first, outcome.findings),
            steps_by_rank(actual),
            steps_by_rank(reference) if reference else None,
            [metadata(rank) for rank in range(actual.world_size)],
            [losses for _, losses in outcome.checks[0].losses],
            invariant=first.check != "reference",
        )
    except Exception as error:  # what was found has to be printed all the same
        print(f"warning: the diagnosis broke off with {error!r}", file=sys.stderr)
        return None


def ranks_of(first: Finding, findings: list[Finding]) -> list[int]:
    """Return the ranks on which the tensor of a finding fails in the same step."""
    return sorted(
        {f.rank for f in findings if (f.step, f.kind, f.name) == (first.step, first.kind, first.name)}
    )
