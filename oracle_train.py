"""Train the same job in NumPy float64: one process, gradients derived by hand, nothing distributed.

    python oracle_train.py --model eager --output-dir results/oracle-eager
    python oracle_train.py --model simplefsdp --seed 0 --steps 10 --output-dir results/oracle-simplefsdp

Two runs of one distributed plan share the plan's mistakes. This one shares nothing with them but the
initial parameters, which make_model draws from the seed, and the formula of the data. It writes one
file, rank-0.pt, for the whole global batch. compare_training.py compares runs of any number of ranks with it.
"""

import numpy as np
import torch

from training_common import (
    GLOBAL_BATCH_SIZE,
    INPUT_FEATURES,
    LEARNING_RATE,
    add_job_arguments,
    make_model,
    make_parser,
    prepare_output_dir,
    print_line,
    run_script,
    save_results,
)

# Below this, in units of the largest pre-activation, float32 cannot tell a pre-activation from zero:
# the sum of INPUT_FEATURES products carries a rounding error of that size.
KINK = 4 * np.finfo(np.float32).eps


def make_batch_numpy(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return batch and target of one step (counted from 0), float64, (GLOBAL_BATCH_SIZE, INPUT_FEATURES).

    batch[i, j] = ((i * INPUT_FEATURES + j) mod 257) / INPUT_FEATURES - 1 + step / 10, rounded to float32
    as the data of the job is; target = cos(batch).
    """
    i, j = np.ogrid[:GLOBAL_BATCH_SIZE, :INPUT_FEATURES]
    grid = np.float32((i * INPUT_FEATURES + j) % 257) / np.float32(INPUT_FEATURES) - np.float32(1)
    batch = np.float64(grid + np.float32(step / 10))
    return batch, np.cos(batch)


def train_step(parameters: dict[str, np.ndarray], step: int) -> tuple[np.ndarray, float, dict, dict]:
    """Return output, loss, gradients and their slack of one step, all float64.

    With x (samples, features), z = x W0' + b0, h = max(z, 0), y = h W2' + b2 and the loss
    mean((y - t)^2) over n = samples x features elements, the chain rule gives

        dy = 2 (y - t) / n      dW2 = dy' h     db2 = sum of dy over the samples
        dh = dy W2              dz = dh where z > 0, else 0
        dW0 = dz' x             db0 = sum of dz over the samples

    Slack is by how much a gradient's elements may be off because z is so near to zero that rounding
    decides whether ReLU lets dh pass: the sum of the terms in doubt. Empty if there are none.
    """
    w0, w2 = parameters["0.weight"], parameters["2.weight"]
    x, target = make_batch_numpy(step)
    z = x @ w0.T + parameters.get("0.bias", 0.0)
    h = np.maximum(z, 0.0)
    y = h @ w2.T + parameters.get("2.bias", 0.0)
    loss = np.mean((y - target) ** 2)

    dy = 2.0 * (y - target) / y.size
    dh = dy @ w2
    dz = np.where(z > 0.0, dh, 0.0)
    gradients = {"0.weight": dz.T @ x, "2.weight": dy.T @ h}
    in_doubt = np.abs(np.where(np.abs(z) <= KINK * np.abs(z).max(), dh, 0.0))
    slack = {"0.weight": in_doubt.T @ np.abs(x)} if in_doubt.any() else {}
    if "0.bias" in parameters:
        gradients |= {"0.bias": dz.sum(axis=0), "2.bias": dy.sum(axis=0)}
        slack |= {"0.bias": in_doubt.sum(axis=0)} if in_doubt.any() else {}
    return y, float(loss), {name: gradients[name] for name in parameters}, slack


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors, under the same names."""
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def train_oracle(kind: str, seed: int, steps: int) -> list[dict]:
    """Return the records of the whole job, as training_common.train does, in float64.

    Each also holds "slack", for the parameters whose gradients rounding may change (see train_step).
    """
    model = make_model(kind, seed)
    parameters = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    initial, records = parameters, []
    for step in range(steps):
        output, loss, gradients, slack = train_step(parameters, step)
        deltas = {name: -LEARNING_RATE * gradient for name, gradient in gradients.items()}
        parameters = {name: parameters[name] + deltas[name] for name in parameters}
        records.append(
            {
                "output": torch.from_numpy(output),
                "loss": loss,
                "local_loss": loss,
                "gradients": as_tensors(gradients),
                "parameters": as_tensors(parameters),
                "deltas": as_tensors(deltas),
                "slack": as_tensors(slack),
            }
        )
    records[0]["initial"] = as_tensors(initial)
    return records


def main() -> None:
    """Train as the options say and write the one file."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", choices=("eager", "simplefsdp"), required=True, help="with or without biases"
    )
    add_job_arguments(parser)
    parser.set_defaults(device="cpu", backend=None)  # save_results records them; here they are no options
    args = parser.parse_args()
    prepare_output_dir(args.output_dir)
    records = train_oracle(args.model, args.seed, args.steps)
    for step, record in enumerate(records, start=1):
        print_line(f"step={step}/{args.steps} loss={record['loss']:.9f}")
    save_results(
        args,
        records,
        model=args.model,
        mode="oracle",
        rank=0,
        world_size=1,
    )


if __name__ == "__main__":
    run_script(main)
