// The operators. A handful make tensors, views and copies; all others go through one fallback, which
// has the CPU compute on the device tensors' memory, and which lets no CPU tensor take part.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>

#include "standin.h"

namespace standin {
using at::Tensor;
using c10::Device;
using std::nullopt;
using std::optional;

const auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor host_alias(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(
      owner->mutable_data(), owner, [](void* context) { delete static_cast<c10::Storage*>(context); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data),
                       c10::GetAllocator(at::kCPU), /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return alias;
}

// ---- Making and copying

static Device device_of(optional<Device> device, optional<at::Layout> layout, optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "neuron has strided tensors only");
  TORCH_CHECK(!pin.value_or(false), "only CPU tensors can be pinned");
  return device && device->has_index() ? *device : Device(kNeuron, current_device());
}
static Tensor empty(at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout> layout,
                    optional<Device> device, optional<bool> pin, optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_of(device, layout, pin));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype,
                            optional<at::Layout> layout, optional<Device> device, optional<bool> pin) {
  c10::DeviceGuard guard(device_of(device, layout, pin));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}
static Tensor copy_from(const Tensor& source, const Tensor& target, bool /*non_blocking*/) {
  host_alias(target).copy_(host_alias(source));  // the one way from a device to another
  return target;
}
static Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// ---- Errors on request. A device does not round as the CPU does, and may be faulty:
//   STANDIN_NOISE=k             whatever an operator computes is off by up to k units in the last place,
//                               one arithmetic operation on single elements by up to one (IEEE 754)
//   STANDIN_ERROR=s:r:e:op      in step s, on rank r, the first call of op is off by e, relatively, in the
//                               largest element of its result; for instance 3:1:1e-3:aten::mm

static std::atomic<int64_t> calls{0}, step{1};
static std::atomic<bool> error_made{false};
void next_step() { ++step; }

static void disturb(const std::string& op, const Tensor& result) {
  static const char *noise = std::getenv("STANDIN_NOISE"), *error = std::getenv("STANDIN_ERROR");
  static const char* rank_text = std::getenv("RANK");
  static const int rank = rank_text ? std::atoi(rank_text) : 0;
  // What moves values about and computes none is exact on every device.
  // (In-place and out= forms of an operator come here under its plain name.)
  static const std::set<std::string> exact = {
      "aten::fill_",      "aten::zero_", "aten::cat",   "aten::_chunk_cat", "aten::split_with_sizes_copy",
      "aten::threshold_backward", "aten::index", "aten::where", "aten::relu"};
  static const std::set<std::string> one_rounding = {"aten::add", "aten::sub", "aten::mul", "aten::div"};
  if (!result.is_floating_point() || result.numel() == 0 || exact.count(op)) return;

  int at_step = 0, at_rank = 0;
  double relative = 0;
  char name[64] = "";
  if (error) std::sscanf(error, "%d:%d:%lf:%63s", &at_step, &at_rank, &relative, name);
  const bool wrong = op == name && step == at_step && rank == at_rank && !error_made.exchange(true);
  if (!noise && !wrong) return;

  const Tensor copy = result.to(at::kDouble).contiguous();
  auto* values = copy.mutable_data_ptr<double>();
  if (noise) {
    // A unit in the last place of y is at least y times half the type's eps.
    const auto type = result.scalar_type();
    const int bits = type == at::kDouble ? 53 : type == at::kFloat ? 24 : type == at::kHalf ? 11 : 8;
    std::mt19937_64 random((static_cast<uint64_t>(rank) << 40) + ++calls);
    const double most = one_rounding.count(op) ? std::min(1., std::atof(noise)) : std::atof(noise);
    std::uniform_real_distribution<double> units(-most, most);
    for (int64_t i = 0; i < copy.numel(); ++i) values[i] *= 1 + units(random) * std::ldexp(1., -bits);
  }
  if (wrong) *std::max_element(values, values + copy.numel()) *= 1 + relative;
  result.copy_(copy);
}

// ---- The fallback, for whatever has no kernel of its own

// Call f on every tensor in a value, which may be a tensor or one of PyTorch's lists of them.
template <class F>
static void each_tensor(c10::IValue& value, F f) {
  if (value.isTensor()) {
    Tensor tensor = value.toTensor();
    if (tensor.defined()) f(tensor);
    value = tensor;
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list)
      if (tensor.defined()) f(tensor);
    value = list;
  } else if (value.isOptionalTensorList()) {
    auto list = value.toOptionalTensorList().copy();
    for (size_t i = 0; i < list.size(); ++i)
      if (optional<Tensor> tensor = list.get(i); tensor && tensor->defined()) {
        f(*tensor);
        list.set(i, tensor);
      }
    value = list;
  }
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = toString(op.operator_name());
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const auto is_written = [](const c10::AliasInfo* alias) { return alias && alias->isWrite(); };

  // 1. On which device? All tensors must be on it, as CUDA has it: except that a CPU scalar may be
  // read, and CPU indices may index. (The CPU fallback that PyTorch offers would take any mixture.)
  optional<Device> device;
  for (size_t i = 0; i < count; ++i) {
    auto& argument = (*stack)[first + i];
    each_tensor(argument, [&](Tensor& tensor) {
      if (tensor.is_privateuseone() && !device) device = tensor.device();
    });
    if (argument.isDevice() && argument.toDevice().is_privateuseone()) {
      if (!device) device = device_of(argument.toDevice(), nullopt, nullopt);
      argument = Device(at::kCPU);
    }
  }
  TORCH_CHECK(device, name, " came to neuron without a tensor or device of it");
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    if ((*stack)[first + i].isOptionalTensorList() && name.rfind("aten::index", 0) == 0) continue;
    each_tensor((*stack)[first + i], [&](Tensor& tensor) {
      const bool scalar = tensor.is_cpu() && tensor.dim() == 0 && !is_written(argument.alias_info());
      TORCH_CHECK(tensor.device() == *device || scalar,
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                  " and ", tensor.device(), "! (", name, ")");
    });
  }

  // 2. Put host aliases in their place, and remember what will be written.
  c10::DeviceGuard guard(*device);
  std::vector<std::pair<Tensor, Tensor>> written;  // device tensor, host alias
  std::vector<std::pair<at::Generator, at::Generator>> generators;
  for (size_t i = 0; i < count; ++i) {
    auto& argument = (*stack)[first + i];
    each_tensor(argument, [&](Tensor& tensor) {
      const Tensor alias = host_alias(tensor);
      if (is_written(schema.arguments()[i].alias_info())) written.emplace_back(tensor, alias);
      tensor = alias;
    });
    if (argument.isGenerator() && argument.toGenerator().device().is_privateuseone()) {
      at::Generator ours = argument.toGenerator(), host = at::detail::createCPUGenerator();
      host.set_state(ours.get_state());
      generators.emplace_back(ours, host);
      argument = host;
    }
  }

  // 3. Compute.
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [ours, host] : generators) ours.set_state(host.get_state());
  for (auto& [tensor, alias] : written) {
    disturb(schema.name(), alias);
    if (alias.sizes() != tensor.sizes() || alias.storage().data() != tensor.storage().data()) {
      tensor.resize_(alias.sizes());  // an out= argument was resized
      copy_from(alias, tensor, false);
    }
  }

  // 4. Hand back what was written as what it was, and move what is new to the device.
  const size_t results = schema.returns().size();
  for (size_t i = 0; i < results; ++i)
    each_tensor((*stack)[stack->size() - results + i], [&](Tensor& result) {
      for (auto& [tensor, alias] : written)
        if (result.is_same(alias)) {
          result = tensor;
          return;
        }
      TORCH_CHECK(!schema.returns()[i].alias_info(), name, " returns a view: neuron needs a kernel for it");
      disturb(schema.name(), result);
      auto moved = empty_strided(result.sizes(), result.strides(), result.scalar_type(), nullopt, *device, nullopt);
      result = copy_from(result, moved, false);
    });
}

}  // namespace standin

using torch::CppFunction;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(CppFunction::makeFromBoxedFunction<&standin::fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(CppFunction::makeFallthrough()); }
// Without these two, _copy_from of a conjugated or negated view would be resolved by a copy: by itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", standin::empty);
  m.impl("empty_strided", standin::empty_strided);
  m.impl("_copy_from", standin::copy_from);
  m.impl("_copy_from_and_resize", standin::copy_from_and_resize);
  // Views and sizes: PyTorch's CPU functions do, they touch no values.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view)));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_local_scalar_dense", at::native::_local_scalar_dense_cpu);  // item()
  // Otherwise decomposed into its out= form, which warns that it resizes a scalar.
  m.impl("mse_loss", CppFunction::makeFromBoxedFunction<&standin::fallback>());
}
