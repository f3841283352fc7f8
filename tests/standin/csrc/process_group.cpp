// The process group: Gloo, on the device tensors' memory; and what Python needs of the other two files.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "standin.h"

namespace standin {
using c10d::Work;
using std::vector;
using Tensors = vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using c10::ivalue::Future;

static at::Tensor host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone(), "process group neuron got a tensor on ", tensor.device());
  return host_alias(tensor);
}
template <class T>
static vector<T> host(const vector<T>& list) {
  vector<T> aliases;
  for (auto& item : list) aliases.push_back(host(item));
  return aliases;
}
static Tensors flat(const vector<Tensors>& lists) {
  Tensors all;
  for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Gloo's work on the aliases, with the device tensors as its result: DDP takes the reduced gradients
// from the future.
struct NeuronWork final : Work {
  WorkPtr gloo;
  Tensors outputs;
  c10::intrusive_ptr<Future> future;

  NeuronWork(WorkPtr work, Tensors outputs, int rank)
      : Work(rank, work->retrieveOpType()), gloo(std::move(work)), outputs(std::move(outputs)) {}
  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  bool wait(std::chrono::milliseconds timeout) override { return gloo->wait(timeout); }
  void synchronize() override { gloo->synchronize(); }
  void abort() override { gloo->abort(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future) return future;
    std::set<c10::DeviceIndex> indices;
    for (auto& tensor : outputs) indices.insert(tensor.device().index());
    vector<c10::Device> devices;
    for (auto index : indices) devices.emplace_back(kNeuron, index);
    future = c10::make_intrusive<Future>(c10::ListType::ofTensors(), devices);
    c10::intrusive_ptr<Future> theirs;
    try {
      theirs = gloo->getFuture();
    } catch (const c10::Error&) {  // Gloo's reduce-scatter has none
      gloo->wait();
    }
    if (!theirs) {
      future->markCompleted(outputs);
      return future;
    }
    theirs->addCallback([ours = future, outputs = outputs](Future& done) {
      if (done.hasError()) ours->setError(done.exception_ptr());
      else ours->markCompleted(outputs);
    });
    return future;
  }
};

struct NeuronBackend final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit NeuronBackend(c10::intrusive_ptr<c10d::Backend> backend)
      : Backend(backend->getRank(), backend->getSize()), gloo(std::move(backend)) {}
  const std::string getBackendName() const override { return "neuron"; }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }

  WorkPtr wrap(WorkPtr work, Tensors outputs) {
    return c10::make_intrusive<NeuronWork>(std::move(work), std::move(outputs), rank_);
  }
  // Collectives in place, and from inputs to outputs: the same four lines for each.
#define IN_PLACE(name, Tensor_s, Options)                                       \
  WorkPtr name(Tensor_s& data, const c10d::Options& options) override {         \
    auto aliases = host(data);                                                  \
    return wrap(gloo->name(aliases, options), data);                            \
  }
#define IN_TO_OUT(name, Outputs, Inputs, Options, list)                                   \
  WorkPtr name(Outputs& outputs, Inputs& inputs, const c10d::Options& options) override { \
    auto out = host(outputs);                                                             \
    auto in = host(inputs);                                                               \
    return wrap(gloo->name(out, in, options), list);                                      \
  }
  IN_PLACE(broadcast, Tensors, BroadcastOptions)
  IN_PLACE(allreduce, Tensors, AllreduceOptions)
  IN_PLACE(allreduce_coalesced, Tensors, AllreduceCoalescedOptions)
  IN_PLACE(reduce, Tensors, ReduceOptions)
  IN_TO_OUT(allgather, vector<Tensors>, Tensors, AllgatherOptions, flat(outputs))
  IN_TO_OUT(allgather_coalesced, vector<Tensors>, Tensors, AllgatherOptions, flat(outputs))
  IN_TO_OUT(_allgather_base, at::Tensor, at::Tensor, AllgatherOptions, {outputs})
  IN_TO_OUT(allgather_into_tensor_coalesced, Tensors, Tensors, AllgatherOptions, outputs)
  IN_TO_OUT(gather, vector<Tensors>, Tensors, GatherOptions, flat(outputs))
  IN_TO_OUT(scatter, Tensors, vector<Tensors>, ScatterOptions, outputs)
  IN_TO_OUT(reduce_scatter, Tensors, vector<Tensors>, ReduceScatterOptions, outputs)
  IN_TO_OUT(_reduce_scatter_base, at::Tensor, at::Tensor, ReduceScatterOptions, {outputs})
  IN_TO_OUT(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatterOptions, outputs)
  IN_TO_OUT(alltoall, Tensors, Tensors, AllToAllOptions, outputs)
  WorkPtr alltoall_base(at::Tensor& outputs, at::Tensor& inputs, vector<int64_t>& output_sizes,
                        vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto out = host(outputs);
    auto in = host(inputs);
    return wrap(gloo->alltoall_base(out, in, output_sizes, input_sizes, options), {outputs});
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;  // Gloo refuses to be told a device
    plain.device.reset();
    plain.device_ids.clear();
    return gloo->barrier(plain);
  }
  WorkPtr send(Tensors& data, int to, int tag) override {
    auto aliases = host(data);
    return gloo->send(aliases, to, tag);
  }
  WorkPtr recv(Tensors& data, int from, int tag) override {
    auto aliases = host(data);
    return gloo->recv(aliases, from, tag);
  }
  WorkPtr recvAnysource(Tensors& data, int tag) override {
    auto aliases = host(data);
    return gloo->recvAnysource(aliases, tag);
  }
};

void next_step();  // ops.cpp

}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &standin::device_count);
  m.def("current_device", [] { return static_cast<int>(standin::current_device()); });
  m.def("set_device", &standin::set_device);
  m.def("is_initialized", &standin::is_initialized);
  m.def("next_step", &standin::next_step);
  m.def("over_gloo", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<standin::NeuronBackend>(gloo));
  });
}
