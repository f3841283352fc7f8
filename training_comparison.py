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
    place_of,
    slacks_of,
)
from training_tolerance import (
    DEFAULTS,
    NEGLIGIBLE,
    NOTHING_MORE,
    Allowance,
    Result,
    Tolerance,
    allow_movement,
    allow_rounding_of,
    allow_slack,
    compare_tensor,
    eps_of,
    largest,
    mismatch,
    other_type,
    unit_of,
)


class Comparison:
    """Compare a run with a reference; both give their ranks one after another."""

    def __init__(self, tolerance: Tolerance, any_type: bool) -> None:
        """any_type: the reference may be of other dtypes, as the oracle's float64 is."""
        self.tolerance, self.any_type = tolerance, any_type
        self.findings: list[Finding] = []
        self.results: dict[Key, list[tuple[int, int, Result]]] = defaultdict(list)  # (rank, step, result)
        self.scores: list[list[float]] = []  # by rank and step: worst error as a share of what is allowed
        # The first pair at each place, with its result: most ranks have the same two tensors again.
        self._known: dict[Place, tuple[torch.Tensor | None, torch.Tensor | None, Result]] = {}

    def add(self, metadata: dict, reference: Steps, actual: Steps, slacks: list[Tensors]) -> None:
        """Compare a rank. slacks: by step, what the oracle allows in addition (see oracle_train.py)."""
        rank, replica = metadata["rank"], metadata["dp_rank"]
        self.scores.append([])
        unit = unit_of(actual, trusted=None if self.any_type else reference)
        for step, slack in enumerate(slacks):
            worst = 0.0
            for key in reference[step] | actual[step]:
                pair = actual[step].get(key), reference[step].get(key)
                place = place_of(step, key, replica)
                known = self._known.get(place)
                if known and pair[0] is known[0] and pair[1] is known[1]:
                    result = known[2]
                else:
                    on_top = allowance_of(key, reference[step], reference[0], slack, unit, pair)
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
    floor = NEGLIGIBLE * largest(references, "gradients" if kind == "gradients" else "deltas")
    return allow_slack(on_top._replace(floor=floor), slack.get(key))


class Outcome(NamedTuple):
    """What compare_runs found."""

    comparison: Comparison | None  # None without a reference
    checks: list[InvariantChecks]  # of the actual run and, if there is one, of the reference
    against_oracle: list[Comparison]  # of the reference and the actual run, if there is an oracle
    losses: list[dict[str, float | None]]  # by step, of rank 0 in each run
    findings: list[Finding]  # in causal order


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
    whole = oracle or (reference if reference and reference.whole else None)
    slacks = slacks_of(whole.first) if whole else [{}] * (actual.metadata["steps"] + 1)
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
            check_same_parameters(
                steps["reference"], steps["actual"], ("the reference", f"rank {rank} of the actual run")
            )
            check_reference_rank(checks[1], reference, metadata, steps["reference"])
            comparison.add(metadata, steps["reference"], steps["actual"], slacks)
        if oracle:
            steps["oracle"] = oracle.steps(rank, metadata)
            check_same_parameters(steps["oracle"], steps["actual"], ("the oracle", f"rank {rank}"))
            for one, name in zip(against_oracle, ("reference", "actual"), strict=True):
                one.add(metadata, steps["oracle"], steps[name], slacks)
        if rank == 0:
            order = {key: place for place, key in enumerate(steps.get("reference", steps["actual"])[1])}
            for name, of_run in steps.items():
                for step, tensors in enumerate(of_run[1:]):
                    losses[step][name] = tensors[LOSS].item() if LOSS in tensors else None
    progress("")
    check_replicas(checks[0], actual)
    findings = [finding for check in checks for finding in check.finish()]
    findings += comparison.findings if comparison else []
    return Outcome(comparison, checks, against_oracle, losses, in_causal_order(findings, order))


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
    try:
        return find_cause(
            (first.step, first.kind, first.name),
            ranks_of(first, outcome.findings),
            steps_by_rank(actual),
            steps_by_rank(reference) if reference else None,
            [actual.rank(rank)["metadata"] for rank in range(actual.world_size)],
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
