"""One sketch against another: the criterion for recordings, what is allowed on top, and what is found.

    norm(actual - reference) <= 16 eps * norm(reference) + what is allowed on top      (bfloat16: 2 eps)

Both norms are estimated from sketches. Allowed on top is, from the second step on, what follows from the
parameters' own differences; and for an optimizer such as Adam what it makes of gradients that are near
zero. RECORDING.md has the measurements behind them.
"""

from collections import defaultdict
from math import inf, prod

import torch

from training_recorded_runs import Whole
from training_records import Finding, Key
from training_tolerance import NORM_EPS, Result, bound_of, drift_share, mismatch, share_of_rounding

CAUSAL_ORDER = ("inputs", "activations", "losses", "gradients", "parameters", "buffers")

# ---------------------------------------------------------------- one tensor against another


def distance(one: Whole, other: Whole) -> float:
    """Return the norm of the difference of two tensors, as their sketches estimate it."""
    return (one.sketch - other.sketch).norm().item()


def judge(difference: float, norm: float, eps: float, more: float, norm_eps: float) -> Result:
    """Judge a norm of a difference. eps: 0 for whole numbers, which must be equal; more: allowed on top."""
    allowed = norm_eps * eps * norm + more
    unit = eps or 1.0
    relative = difference / unit / (norm or 1.0)
    passed = difference <= allowed
    score = difference / allowed if allowed else (inf if difference else 0.0)
    needed = max(0.0, difference - more) / (unit * norm) if norm else (inf if difference else 0.0)
    if passed:
        return Result(True, score, relative, 0.0, needed)
    text = f": the norm differs by {relative:.3g} eps, allowed {allowed / unit / (norm or 1.0):.3g} eps"
    return Result(False, score, relative, 0.0, needed, text)


def judge_whole(
    actual: Whole | None,
    reference: Whole | None,
    unit: float,
    more: float = 0.0,
    norm_eps: float | None = None,
) -> Result:
    """Judge a parameter, gradient or buffer; unit: the eps of the run, in which it is computed."""
    if actual is None or reference is None:
        return mismatch(f": there is none in the {'actual' if actual is None else 'reference'} run")
    if actual.dtype != reference.dtype:
        return mismatch(f": its type is {actual.dtype}, expected {reference.dtype}".replace("torch.", ""))
    for run, tensor in (("reference", reference), ("actual", actual)):
        if tensor.not_finite:
            return mismatch(f": {tensor.not_finite} values are not finite in the {run} run")
    eps = max(unit, torch.finfo(actual.dtype).eps) if actual.dtype.is_floating_point else 0.0
    bound = bound_of(eps, len(reference.shape), norm_eps)
    return judge(distance(actual, reference), reference.norm, eps, more, bound)


# ---------------------------------------------------------------- what is allowed on top


class Drift:
    """By how much parameters differ at the start of a step, and may: later steps start from them."""

    def __init__(self) -> None:
        self.measured: dict[str, tuple[float, float, int]] = {}  # difference, norm, dimensions
        self.allowed: dict[str, float] = defaultdict(float)  # by adaptive_allowance, added up over the steps
        self.explained: dict[str, str] = {}  # parameters that pass by that alone, and their optimizer
        self.silent: set[str] = set()  # parameters whose gradient is nothing but rounding

    def of_activation(self, name: str, shape: tuple[int, ...], norm: float) -> float:
        """Return what a module's own parameters allow of its output; of a container, its parts'.

        A bias, or a norm's weight, that differs by d changes each row of the output by d. A matrix changes
        the output by about the share by which it differs itself. Twice that is allowed: d and the error of
        the output are both estimated, and the estimates are off by up to a third.
        """
        name = name.partition(" call ")[0]
        rows = prod(shape[:-1])
        by_module: dict[str, float] = defaultdict(float)
        for parameter, (difference, own_norm, dimensions) in self.measured.items():
            module = parameter.rpartition(".")[0]
            if name in (module, "(model)") or module.startswith(f"{name}."):
                share = difference / own_norm * norm if own_norm else 0.0
                by_module[module] += 2 * (rows**0.5 * difference if dimensions < 2 else share)
        return max(by_module.values(), default=0.0)

    def of_buffer(self, norm: float, eps: float) -> float:
        """Return what the parameters allow of a buffer that is updated in training, as a batch norm's is.

        A parameter whose gradient is nothing but rounding, such as a bias before a batch norm, may differ
        by full steps. It shifts the mean that the buffer holds by as much.
        """
        silent = sum(self.measured[name][0] ** 2 for name in self.silent if name in self.measured)
        return self.of_all(norm, eps) + silent**0.5

    def of_all(self, norm: float, eps: float) -> float:
        """Return what the parameters of all modules together allow of any activation or gradient.

        Parameters without a gradient do not change the loss and do not count.
        """
        counted = {name: seen[:2] for name, seen in self.measured.items() if name not in self.silent}
        return drift_share(counted, eps) * norm


def adaptive_allowance(gradient: Whole, rate: float, eps: float, floor: float, scale: float) -> float:
    """Return the norm by which one step of Adam, or its kin, may differ because of rounding.

    Its step is about rate * g / sqrt(mean of g squared), for each element by itself. Rounding of a
    gradient is of the size r = 16 eps * (root mean square of the gradient), whatever the element. So an
    element of size g may move by rate * min(2, r / g) more or less. A gradient that is zero is so in both
    runs. One that stays below the floor is nothing but rounding. scale: see scale_of_rounding.
    """
    count = int(gradient.magnitudes.sum()) + gradient.zeros
    rounding = inf if gradient.largest <= floor else NORM_EPS * eps * scale / max(1, count) ** 0.5
    size = 2.0 ** (torch.arange(256, dtype=torch.float64) - 127)  # the least of each magnitude
    size[0] = 0.0
    share = (rounding / size).clamp(max=2.0).nan_to_num(nan=0.0, posinf=2.0)
    return rate * (gradient.magnitudes * share.square()).sum().item() ** 0.5


def scale_of_rounding(name: str, gradients: dict[str, list[Whole]]) -> float:
    """Return the norm to which the rounding of a gradient is relative: its own, or more for a bias.

    A bias's gradient is a sum over all rows, whose terms may cancel. The gradient of its module's weight
    is of the same rows, each times an input of about size 1 and another sign: over the root of its columns
    it tells what the sum would be without that. A router's bias was 19.7 eps off, 0.5 of this.
    """
    norm, weights = gradients[name][0].norm, gradients.get(f"{name.removesuffix('.bias')}.weight")
    if not name.endswith(".bias") or weights is None or len(weights[0].shape) < 2:
        return norm
    return max(norm, weights[0].norm / weights[0].shape[-1] ** 0.5)


def floor_of(gradients: dict[str, list[Whole]], eps: float) -> float:
    """Return the magnitude below which a gradient of this step is zero but for rounding."""
    return share_of_rounding(eps) * max((copies[0].largest for copies in gradients.values()), default=0.0)


# ---------------------------------------------------------------- what is found


class Divergence:
    """What comparing two recordings has found; with the fields that training_comparison.Comparison has."""

    def __init__(self, world_size: int, steps: int) -> None:
        self.results: dict[Key, list[tuple[int, int, Result]]] = defaultdict(list)  # (rank, step, result)
        self.findings: list[Finding] = []
        self.scores = [[0.0] * (steps + 1) for _ in range(world_size)]  # by rank and step
        self.notes: list[str] = []  # what is to be known, and no mistake
        self.order: list[Key] = []  # keys as they come in a step
        # Steps in which an activation was not compared, by the reason and its name.
        self.skipped: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def add(self, step: int, key: Key, ranks: tuple[int, ...], result: Result) -> None:
        """Keep the result of a tensor that these ranks have."""
        if key not in self.results:
            self.order.append(key)
        for rank in ranks:
            self.results[key].append((rank, step, result))
            self.scores[rank][step] = max(self.scores[rank][step], result.score)
            if not result.passed:
                self.findings.append(Finding(step, rank, *key, "reference", result.message))

    def note(self, text: str) -> None:
        """Keep a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def path(self) -> list[dict]:
        """The way through the model: of each activation and gradient, by step, the worst error in eps.

        Activations are in the order of execution, gradients from the last layer to the first.
        """
        found = []
        for kind in ("activations", "gradients"):
            for key in [key for key in self.order if key[0] == kind]:
                by_step: dict[int, list[Result]] = defaultdict(list)
                for _, step, result in self.results[key]:
                    by_step[step].append(result)
                steps = range(1, len(self.scores[0]))
                errors = [max((r.eps for r in by_step[step]), default=None) for step in steps]
                failed = [any(not r.passed for r in by_step[step]) for step in steps]
                found.append({"kind": kind, "name": key[1], "eps": errors, "failed": failed})
        return found

    def by_kind(self) -> dict[str, list[Result]]:
        """Return the results of each kind of tensor."""
        kinds = {kind: [] for kind in CAUSAL_ORDER}
        for (kind, _), results in self.results.items():
            kinds[kind] += [result for _, _, result in results]
        return kinds
