"""Mistakes in a DDP loop: the loss, backward and the optimizer."""

import torch
import torch.distributed as dist
from faulty_cases import (
    FIRST_UPDATE,
    LAST_GRADIENT,
    RANK,
    case,
    change_backward,
    change_gradients,
    change_step,
)
from torch.optim import SGD

import distributed_train as eager
from training_records import LOSS

# ---------------------------------------------------------------- loss and backward


@case("ddp", 1, LOSS, "elements of the output|not finite")
def loss_summed_ddp(patch):
    """The loss is the sum over all elements, not their mean: reduction="sum" in an otherwise equal script."""
    mean = torch.nn.functional.mse_loss
    patch(torch.nn.functional, "mse_loss", lambda output, target: mean(output, target, reduction="sum"))


@case("ddp", 1, LOSS, "not averaged")
def losses_not_averaged_ddp(patch):
    """Each rank reports the loss of its own slice as the global one; training itself is right."""
    patch(eager, "average_losses", lambda records, device: None)


@case("ddp", 1, LAST_GRADIENT, "1024")
def loss_scale_not_removed_ddp(patch):
    """The loss is scaled by 1024 for backward, and the gradients are not scaled back.

    A mixed-precision loop whose unscale step got lost.
    """
    change_backward(patch, 1024)


@case("ddp", 1, LAST_GRADIENT, "twice")
def step_run_twice_ddp(patch):
    """Forward and backward run twice before the update: the gradients are twice what they should be.

    A warm-up, a profiler or a retry runs the step once more and does not clear what it left.
    """

    def wrap(train_step, parameters):
        def wrapped(step):
            train_step(step)
            return train_step(step)

        return wrapped

    change_step(patch, eager, wrap)


@case("ddp", 1, LAST_GRADIENT, "twice|not reduced")
def backward_called_twice_ddp(patch):
    """backward() is called twice after one forward: the second adds each rank's own gradients.

    DDP reduces in the first backward after a forward only, so ranks get mean + own.
    """
    backward = torch.Tensor.backward

    def twice(loss):
        backward(loss, retain_graph=True)
        backward(loss)

    patch(torch.Tensor, "backward", twice)


@case("ddp", 1, LAST_GRADIENT, "clipped")
def gradients_clipped_ddp(patch):
    """Gradients are scaled to a global norm of 0.01 before the update: clipping left on."""
    change_gradients(
        patch,
        eager,
        lambda parameters, step: torch.nn.utils.clip_grad_norm_(parameters.values(), 0.01),
    )


@case("ddp", 1, LAST_GRADIENT, "bfloat16")
def gradients_in_bf16_ddp(patch):
    """The reduced gradients are rounded to bfloat16 in a float32 run.

    A buffer for main gradients whose dtype was taken from the mixed-precision configuration.
    """

    def change(parameters, step):
        for parameter in parameters.values():
            parameter.grad.copy_(parameter.grad.bfloat16())

    change_gradients(patch, eager, change)


# ---------------------------------------------------------------- optimizer


@case("ddp", 2, LAST_GRADIENT, "zero_grad")
def zero_grad_forgotten_ddp(patch):
    """Gradients are never cleared: every step adds its own to those of all steps before."""

    class Keeping(SGD):
        def zero_grad(self, set_to_none=True):
            pass

    patch(torch.optim, "SGD", Keeping)


@case("ddp", 2, FIRST_UPDATE, "before the gradient has arrived")
def stale_gradient_ddp(patch):
    """From step 2 on, the update uses the gradients of the step before; the recorded ones are right.

    Overlapping the update with the next backward, without waiting for the reduction.
    """

    class Stale(SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                fresh, state = parameter.grad, self.state[parameter]
                parameter.grad = state.get("stale", fresh)
                state["stale"] = fresh
            return super().step(closure)

    patch(torch.optim, "SGD", Stale)


@case("ddp", 1, ("parameters", "2.weight"), "not updated by the optimizer")
def parameter_missing_from_optimizer_ddp(patch):
    """The optimizer does not know 2.weight, which has gradients and never changes.

    A head that was replaced or tied after the optimizer had been made.
    """

    def make(parameters, lr):
        first, first_bias, _, second_bias = parameters
        return SGD([first, first_bias, second_bias], lr=lr)

    patch(torch.optim, "SGD", make)


@case("ddp", 2, FIRST_UPDATE, "momentum")
def momentum_left_on_ddp(patch):
    """Plain SGD was meant, momentum 0.9 is on: the first step is the same, later ones are larger."""
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr, momentum=0.9))


@case("ddp", 1, FIRST_UPDATE, "weight decay")
def weight_decay_left_on_ddp(patch):
    """Plain SGD was meant, weight decay 0.01 is on: a default of many training configurations."""
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr, weight_decay=0.01))


@case("ddp", 1, FIRST_UPDATE, "world size")
def learning_rate_scaled_ddp(patch):
    """The learning rate is multiplied by the number of replicas, the linear scaling rule.

    The rule is for batches that grow with the replicas; here the global batch is fixed.
    """
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr * dist.get_world_size()))


@case("ddp", 2, FIRST_UPDATE, "acts as 0.009")
def learning_rate_decays_ddp(patch):
    """A scheduler multiplies the learning rate by 0.9 after every step, where it was meant constant."""

    def make(parameters, lr):
        optimizer = SGD(parameters, lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    patch(torch.optim, "SGD", make)


@case("ddp", 1, FIRST_UPDATE, "twice")
def update_applied_twice_ddp(patch):
    """optimizer.step() runs twice: once in the loop and once in a callback or a scaler."""

    class Twice(SGD):
        def step(self, closure=None):
            super().step()
            return super().step(closure)

    patch(torch.optim, "SGD", Twice)


@case("ddp", 1, FIRST_UPDATE, "Adam")
def adam_instead_of_sgd_ddp(patch):
    """The optimizer is Adam, not SGD: its first update is the learning rate times the gradient's sign."""
    patch(torch.optim, "SGD", torch.optim.Adam)


@case("ddp", 1, FIRST_UPDATE, "bfloat16")
def parameters_in_bf16_ddp(patch):
    """Updated parameters are rounded to bfloat16: there is no float32 master copy of the weights.

    Updates smaller than half a unit of bfloat16 are lost altogether.
    """

    class Rounding(SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                parameter.copy_(parameter.bfloat16())

    patch(torch.optim, "SGD", Rounding)


@case("ddp", 1, FIRST_UPDATE, "rank 3")
def learning_rate_differs_on_one_rank_ddp(patch):
    """Rank 3 updates with twice the learning rate: a node that was started with another configuration."""
    patch(torch.optim, "SGD", lambda parameters, lr: SGD(parameters, lr=lr * (2 if RANK == 3 else 1)))


@case("ddp", 2, ("parameters", "2.weight"), "memory was changed")
def bit_flip_ddp(patch):
    """At step 2 one bit flips in one element of rank 1's 2.weight: silent data corruption in memory."""

    class Flipping(SGD):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            self.steps += 1
            if RANK == 1 and self.steps == 2:
                bits = self.param_groups[0]["params"][2].detach().view(torch.int32)
                bits[3, 5] ^= 1 << 23  # the lowest bit of the exponent: twice or half the value

    patch(torch.optim, "SGD", Flipping)


@case("ddp", 2, FIRST_UPDATE, "update was skipped")
def update_skipped_on_one_rank_ddp(patch):
    """At step 2 rank 2 does not update layer 0; all other ranks do.

    An optimizer with sharded state, whose owner's broadcast of updated parameters missed a rank.
    """

    class Skipping(SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if RANK == 2 and self.steps == 2:
                for parameter in self.param_groups[0]["params"][:2]:
                    parameter.grad = None
            return super().step(closure)

    patch(torch.optim, "SGD", Skipping)
