"""One tensor against another: the criterion, its defaults, and what is measured on the way.

A tensor passes if both hold:

    element by element    |actual - reference| <= atol + rtol * |reference|
    as a whole            norm(actual - reference) <= norm_eps * eps * norm(reference)

eps is the spacing of the dtype's numbers at 1. The defaults are rtol = 64 eps, atol = rtol times the
largest magnitude in the reference, norm_eps = 16. NUMERICS.md has the measurements behind them. Some
kinds of tensors are allowed more: callers say how much, see Allowance.
"""

from math import inf
from typing import NamedTuple

import torch

from training_records import Steps, Tensors, trained

# Measured by tests/tools/measure_error.py: clean runs stay at least four times below both.
ELEMENT_EPS = 64.0  # default rtol, in eps of the dtype: 7.6e-6 in float32
NORM_EPS = 16.0  # default norm_eps
# A gradient below this share of the largest one of its step is zero but for rounding, such as that of a
# bias before a batch norm: 16 eps of float32, whatever the dtype.
NEGLIGIBLE = 16 * 2.0**-23


class Tolerance(NamedTuple):
    """What --rtol, --atol and --norm-eps say; None where the default applies."""

    rtol: float | None = None
    atol: float | None = None
    norm_eps: float | None = None


class Allowance(NamedTuple):
    """What a caller allows in addition to the tolerance, and what the error is given relative to."""

    element: torch.Tensor | float = 0.0  # absolute error of each element
    norm: float = 0.0  # absolute norm of the error
    only_by_default: bool = False  # with --rtol neither is allowed: that option then says all
    relative_to: float | None = None  # Result.eps is given relative to this norm; None: the reference's
    floor: float = 0.0  # if both tensors stay below it, they are zero but for rounding, and pass


class Result(NamedTuple):
    """How one tensor of one rank and step compares."""

    passed: bool
    score: float = 0.0  # the error as a share of what is allowed; above 1 it failed
    eps: float = 0.0  # norm of the error over norm of the reference, in eps of the dtype
    needed_rtol: float = 0.0  # smallest rtol under which it would have passed; inf if none would
    needed_norm_eps: float = 0.0  # the same for norm_eps
    message: str = ""  # for a failed one: where and by how much; for a passed one: why it was not compared


DEFAULTS = Tolerance()
NOTHING_MORE = Allowance()


# ---------------------------------------------------------------- measuring


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64 or complex128, in which every dtype can be computed with."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def eps_of(*tensors: torch.Tensor) -> float:
    """Return the coarsest eps of the floating-point tensors among these; 0 if there are none."""
    return max(
        (torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()), default=0.0
    )


def unit_of(steps: Steps, trusted: Steps | None) -> float:
    """Return the eps in which a run's errors are judged: the coarsest of its trained parameters' dtypes.

    trusted: the run whose outputs, gradients and deltas count, too. Autocast in the reference allows
    more. Autocast in the run in question alone is a difference, and no reason to allow more.
    """
    kinds = ("outputs", "gradients", "deltas")
    values = [tensor for (kind, _), tensor in trusted[1].items() if kind in kinds] if trusted else []
    return eps_of(*trained(steps), *values)


def largest(tensors: Tensors, kind: str) -> float:
    """Return the largest magnitude among the tensors of a kind, 0 if there are none."""
    return max((wide(t).abs().max().item() for (k, _), t in tensors.items() if k == kind), default=0.0)


def factor(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the s for which s * reference is nearest to actual, by least squares; 0 for a reference of 0."""
    a, r = wide(actual).flatten(), wide(reference).flatten()
    square = r.dot(r).item()
    return a.dot(r).item() / square if square else 0.0


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return norm(actual - reference) / norm(reference), computed in float64.

    It is infinite for what cannot be compared: another shape, a value that is not finite, a reference
    of zeros.
    """
    if actual.shape != reference.shape or not (actual.isfinite().all() and reference.isfinite().all()):
        return inf
    norm = wide(reference).norm().item()
    return (wide(actual) - wide(reference)).norm().item() / norm if norm else inf


# ---------------------------------------------------------------- what is allowed on top


def allow_rounding_of(parameter: torch.Tensor, eps: float) -> Allowance:
    """Return what is allowed of a delta: the rounding of the parameter whose two values it separates.

    The difference of two nearly equal numbers has their rounding errors. Allowed are 2 eps of the
    parameter's largest element for each element, and 2 eps of its norm in norm.
    """
    values = wide(parameter)
    norm = values.norm().item()
    return Allowance(2 * eps * values.abs().max(), 2 * eps * norm, relative_to=norm)


def allow_movement(reference: torch.Tensor, initial: torch.Tensor, unit: float) -> Allowance:
    """Return what is allowed of a parameter for what was added to it since training began.

    A float32 parameter may move by bfloat16 gradients. Then its initial value is judged in eps of float32
    and its movement in the unit, eps of bfloat16.
    """
    moved = wide(reference) - wide(initial)
    element, norm = ELEMENT_EPS * unit * moved.abs().max(), NORM_EPS * unit * moved.norm().item()
    return Allowance(element, norm, only_by_default=True)


def allow_slack(allowance: Allowance, slack: torch.Tensor | None) -> Allowance:
    """Add an absolute error of each element, which the oracle gives where a ReLU's sign is in doubt."""
    if slack is None:
        return allowance
    return allowance._replace(element=allowance.element + slack, norm=allowance.norm + slack.norm().item())


# ---------------------------------------------------------------- comparing


def position(index: tuple[int, ...]) -> str:
    """Return how an element is written behind its tensor's name; nothing for a scalar."""
    return str(list(index)) if index else ""


def not_finite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first element that is NaN or infinite, None if there is none."""
    finite = torch.isfinite(tensor)
    return None if finite.all() else tuple(torch.nonzero(~finite)[0].tolist())


def mismatch(message: str) -> Result:
    """Return the result of two tensors that no tolerance makes equal."""
    return Result(False, inf, inf, inf, inf, message)


def other_type(actual: torch.Tensor, reference: torch.Tensor) -> str:
    """Return a message if two tensors of one shape differ in dtype, nothing otherwise."""
    if actual.shape != reference.shape or actual.dtype == reference.dtype:
        return ""
    return f": its type is {actual.dtype}, expected {reference.dtype}".replace("torch.", "")


def compare_tensor(
    actual: torch.Tensor,
    reference: torch.Tensor,
    tolerance: Tolerance = DEFAULTS,
    eps: float = 0.0,
    on_top: Allowance = NOTHING_MORE,
    names: tuple[str, str] = ("reference", "actual"),
) -> Result:
    """Compare two tensors, element by element and by the norm of their difference.

    eps is the unit, by default the coarser of the tensors' own; whole numbers must be equal. An element
    near zero may be the sum of larger terms and carry their rounding error: that is why the default atol
    follows from the largest magnitude. With an rtol or atol and no norm_eps, only elements are judged.
    names: what reference and actual are called in the message.
    """
    if actual.shape != reference.shape:
        return mismatch(f": its shape is {list(actual.shape)}, expected {list(reference.shape)}")
    a, r = wide(actual), wide(reference)
    for name, tensor in zip(names, (r, a), strict=True):
        if (index := not_finite(tensor)) is not None:
            values = f"{names[0]} {r[index].item():.9g}, {names[1]} {a[index].item():.9g}"
            return mismatch(f"{position(index)}: {values}: not finite in the {name} run")
    error = (a - r).abs()
    if not error.any():
        return Result(True)
    if max(a.abs().max(), r.abs().max()) <= on_top.floor:
        return Result(True, message="zero but for rounding in both runs, not compared")

    own = eps_of(actual, reference)
    eps = (eps or own) if own else 0.0
    by_default = tolerance.rtol is None and tolerance.atol is None
    rtol = ELEMENT_EPS * eps if tolerance.rtol is None else tolerance.rtol
    atol = rtol * r.abs().max() if tolerance.atol is None else tolerance.atol
    norm_eps = tolerance.norm_eps if tolerance.norm_eps is not None else NORM_EPS if by_default else inf
    more, more_norm = on_top.element, on_top.norm
    if on_top.only_by_default and tolerance.rtol is not None:
        more, more_norm = 0.0, 0.0

    # The criterion. It asks for "<=" of finite numbers: values near the largest float overflow to
    # infinity, which is not below infinity.
    distance, norm = error.norm().item(), r.norm().item()
    allowed = atol + rtol * r.abs() + more
    allowed_norm = norm_eps * eps * norm + more_norm if norm_eps < inf else inf
    wrong = ~((error <= allowed) & torch.isfinite(allowed))
    passed = bool(not wrong.any() and distance <= allowed_norm)

    unit = eps or 1.0
    whole = norm if on_top.relative_to is None else on_top.relative_to
    relative = distance / unit / (whole or 1.0)
    score = max(
        (error / allowed).nan_to_num(nan=0.0).max().item(), distance / allowed_norm if allowed_norm else inf
    )
    needed = needed_tolerance(error, r, tolerance.atol, unit, on_top)
    if passed:
        return Result(True, score, relative, *needed)
    worst = int((error - allowed).nan_to_num(nan=inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), r.shape))
    message = (
        f"{position(index)}: {names[0]} {r[index].item():.9g}, {names[1]} {a[index].item():.9g}, difference "
        f"{error[index]:.3g}, allowed {allowed[index]:.3g}; {int(wrong.sum())} "
        f"of {r.numel()} elements differ, the norm by {relative:.3g} eps"
    )
    return Result(False, score, relative, *needed, message)


def needed_tolerance(
    error: torch.Tensor, reference: torch.Tensor, atol: float | None, eps: float, on_top: Allowance
) -> tuple[float, float]:
    """Return the smallest rtol and norm_eps under which an error would pass, inf if none would do.

    They would be given explicitly, and so do not count on what is allowed by default only.
    """
    more, more_norm = (0.0, 0.0) if on_top.only_by_default else (on_top.element, on_top.norm)
    magnitude = reference.abs() if atol is not None else reference.abs() + reference.abs().max()
    rtol = (error - more - (atol or 0.0)).clamp(min=0) / magnitude
    norm, distance = reference.norm().item(), error.norm().item()
    norm_eps = max(0.0, distance - more_norm) / (eps * norm) if norm else inf
    return rtol.nan_to_num(nan=0.0, posinf=inf).max().item(), norm_eps
