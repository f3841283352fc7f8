"""The compile backend "neuron": AOTAutograd's graphs run op by op, on neuron tensors only."""

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device


class NeuronInterface(DeviceInterface):
    """What Dynamo asks of a device."""

    device = torch.neuron.device
    Stream = torch.neuron.Stream
    Event = torch.neuron.Event
    device_count = staticmethod(torch.neuron.device_count)
    current_device = staticmethod(torch.neuron.current_device)
    set_device = staticmethod(torch.neuron.set_device)
    is_available = staticmethod(torch.neuron.is_available)
    stream = staticmethod(torch.neuron.stream)
    current_stream = staticmethod(torch.neuron.current_stream)
    set_stream = staticmethod(torch.neuron.set_stream)
    synchronize = staticmethod(torch.neuron.synchronize)


register_interface_for_device("neuron", NeuronInterface)


def neuron(graph, example_inputs, **options):
    """Compile a graph whose inputs are all on neuron; RuntimeError otherwise."""
    for tensor in example_inputs:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "neuron":
            raise RuntimeError(f"compile backend neuron got an input on {tensor.device}")
    return aot_eager(graph, example_inputs, **options)
