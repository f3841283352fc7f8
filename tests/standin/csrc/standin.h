// What the three files of the stand-in share. Start reading with device.cpp.
#pragma once
#include <ATen/core/Tensor.h>

namespace standin {

constexpr auto kNeuron = c10::DeviceType::PrivateUse1;  // "neuron", once Python has renamed it

int device_count();
c10::DeviceIndex current_device();
void set_device(int index);
bool is_initialized();
c10::Allocator* device_allocator();

// A CPU tensor over the same bytes as a device tensor; it keeps the device's storage alive.
at::Tensor host_alias(const at::Tensor& tensor);

}  // namespace standin
