// Process groups that move nothing and write down what they were asked for, and the Python module of the fake device.
//
// A group checks what ProcessGroupNCCL checks (tensors on the device, contiguous, of one dtype, sizes that fit), and
// keeps for every collective and message its kind, sizes, dtype, peer, stream and thread.
#include "device.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <thread>

namespace py = pybind11;

namespace fake {
namespace {

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Entry {
  std::string group, kind, dtype;
  Numbers numbers;               // elements of each tensor
  int64_t peer;                  // of the group: who sends, receives or is the root; -1: nobody
  int64_t stream;
  size_t thread;
  Numbers sent, received;        // elements to and from each rank of the group, where they may differ
};

std::mutex mutex;
std::vector<Entry> entries;

struct Done final : c10d::Work {
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }
};

struct Config {  // ncclConfig_t's fields that torch lets Python set
  int blocking = 0, cga_cluster_size = 0, min_ctas = 0, max_ctas = 0, split_share = 0, traffic_class = 0;
  std::string net_name;
};

struct Options : c10d::Backend::Options {
  explicit Options(bool high_priority)
      : c10d::Backend::Options("nccl"), is_high_priority_stream(high_priority) {}
  bool is_high_priority_stream;
  Config config;
};

class Group : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Store>, int rank, int size, c10::intrusive_ptr<Options> options, bool on_device)
      : Backend(rank, size), options_(std::move(options)), on_device_(on_device) {}

  const std::string getBackendName() const override { return on_device_ ? "nccl" : "gloo"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<Options> options() { return options_; }
  bool supportsCoalescing() const override { return on_device_; }
  void startCoalescing() override { note("start", {}); }
  WorkPtr endCoalescing() override { return note("end", {}); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return note("broadcast", tensors, opts.rootRank);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override { return note("all_reduce", tensors); }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    return note("all_reduce", tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return note("reduce", tensors, opts.rootRank);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (auto& each : out) {
      TORCH_CHECK(static_cast<int>(each.size()) == size_, "all_gather: a tensor for each of ", size_, " ranks");
      see(each);
    }
    if (alike(out[0], in[0])) return note("all_gather", in);
    return note("all_gather_uneven", in, -1, Numbers(size_, in[0].numel()), elements(out[0]));
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    whole("all_gather", out, in);
    return note("all_gather", {in});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions&) override {
    for (size_t each = 0; each < out.size(); ++each) whole("all_gather", out[each], in[each]);
    return note("all_gather", in);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
    whole("reduce_scatter", in, out);
    return note("reduce_scatter", {in});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions&) override {
    for (size_t each = 0; each < out.size(); ++each) whole("reduce_scatter", in[each], out[each]);
    return note("reduce_scatter", in);
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions&) override {
    TORCH_CHECK(static_cast<int>(in[0].size()) == size_, "reduce_scatter: a tensor for each of ", size_, " ranks");
    see(in[0]);
    if (alike(in[0], out[0])) return note("reduce_scatter", out);
    return note("reduce_scatter_uneven", out, -1, elements(in[0]), Numbers(size_, out[0].numel()));
  }
  WorkPtr gather(std::vector<Tensors>&, Tensors& in, const c10d::GatherOptions& opts) override {
    return note("gather", in, opts.rootRank);
  }
  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions&) override {
    TORCH_CHECK(out.scalar_type() == in.scalar_type(), "all_to_all_single: tensors of two dtypes");
    const auto sent = parts(in, in_splits), received = parts(out, out_splits);
    see({out});
    if (in_splits.empty() && out_splits.empty()) return note("all_to_all", {in});
    return note("all_to_all_uneven", {in}, -1, sent, received);
  }
  WorkPtr send(Tensors& tensors, int peer, int) override { return note("send", tensors, peer); }
  WorkPtr recv(Tensors& tensors, int peer, int) override { return note("recv", tensors, peer); }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    if (on_device_) wait("a barrier");
    return note("barrier", {});
  }
  void shutdown() override {}
  void abort() override {}

 private:
  // Check tensors as ProcessGroupNCCL does.
  void see(const Tensors& tensors) const {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(
          tensor.is_cuda() == on_device_, "Tensors must be CUDA and dense: a ", getBackendName(), " group of ", size_,
          " ranks is given one of ", tensor.device(), " and shape ", tensor.sizes());
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous: shape ", tensor.sizes(), ", strides ", tensor.strides());
      TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "Tensors must have identical type");
      TORCH_CHECK(
          !on_device_ || tensor.get_device() == current_device(), "a tensor of ", tensor.device(),
          " where the current device is ", current_device());
    }
  }
  void whole(const char* kind, const at::Tensor& whole, const at::Tensor& part) const {
    see({whole, part});
    TORCH_CHECK(
        whole.numel() == part.numel() * size_, kind, ": a tensor of shape ", whole.sizes(), " is not ", size_,
        " times one of ", part.sizes());
  }
  static Numbers elements(const Tensors& tensors) {
    Numbers result;
    for (const auto& each : tensors) result.push_back(each.numel());
    return result;
  }
  static bool alike(const Tensors& many, const at::Tensor& one) {
    return std::all_of(many.begin(), many.end(), [&](const at::Tensor& each) { return each.numel() == one.numel(); });
  }
  // Elements of each rank's rows; without splits all have as many.
  Numbers parts(const at::Tensor& tensor, const Numbers& splits) const {
    const int64_t rows = tensor.size(0), width = rows ? tensor.numel() / rows : 0;
    TORCH_CHECK(!splits.empty() || rows % size_ == 0, "all_to_all_single: rows do not divide by ", size_);
    Numbers result = splits.empty() ? Numbers(size_, rows / size_) : splits;
    TORCH_CHECK(
        static_cast<int>(result.size()) == size_ && std::accumulate(result.begin(), result.end(), int64_t{0}) == rows,
        "all_to_all_single: splits [", splits, "] are not those of ", rows, " rows over ", size_, " ranks");
    for (auto& each : result) each *= width;
    return result;
  }
  WorkPtr note(
      std::string kind, const Tensors& tensors, int64_t peer = -1, Numbers sent = {}, Numbers received = {}) const {
    see(tensors);
    Entry entry{pg_uid_, std::move(kind), tensors.empty() ? "" : c10::toString(tensors[0].scalar_type()), elements(tensors), peer,
                current_stream(), std::hash<std::thread::id>()(std::this_thread::get_id()), std::move(sent), std::move(received)};
    std::lock_guard<std::mutex> lock(mutex);
    entries.push_back(std::move(entry));
    return c10::make_intrusive<Done>();
  }
  c10::intrusive_ptr<Options> options_;
  bool on_device_;
};

py::list take_entries() {
  std::vector<Entry> taken;
  {
    std::lock_guard<std::mutex> lock(mutex);
    taken.swap(entries);
  }
  py::list result;
  for (const auto& each : taken)
    result.append(py::make_tuple(
        each.group, each.kind, each.numbers, each.dtype, each.peer, each.stream, each.thread, each.sent,
        each.received));
  return result;
}

void listen_to(py::function listener) {
  static py::function* kept = nullptr;  // never destroyed: Python may be gone by then
  kept = new py::function(std::move(listener));
  on_wait = [](const std::string& what) {
    py::gil_scoped_acquire held;
    (*kept)(what);
  };
}

}  // namespace
}  // namespace fake

PYBIND11_MODULE(_device, m) {
  using namespace fake;
  py::module_::import("torch");
  m.attr("TORCH") = TORCH_VERSION;
  m.def("install", &install);
  m.def("set_selected", &set_selected);
  m.def("listen", [](py::function listener) { listen_to(std::move(listener)); });
  m.def("wait", &wait, py::call_guard<py::gil_scoped_release>());
  m.def("take_entries", &take_entries);
  m.def("trace", &trace);
  m.def("set_label", &set_label);
  m.def("take_changes", [] {
    py::list result;
    for (const auto& each : take_changes()) result.append(py::make_tuple(each.block, each.bytes, each.op, each.label));
    return result;
  });
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("begin_fused", &begin_fused);
  m.def("end_fused", &end_fused);
  m.def("allocated", [] { return memory().allocated; });
  m.def("peak", [] { return memory().peak; });
  m.def("allocations", [] { return memory().allocations; });
  m.def("reset_peak", [] { memory().peak = memory().allocated; });
  m.def("set_total", [](int64_t bytes) { memory().total = bytes; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("current_stream", &current_stream);
  m.def("exchange_stream", &exchange_stream);
  m.def("register_pinned", &register_pinned);
  m.def("unregister_pinned", &unregister_pinned);
  m.def("default_generator", [](int index) { return at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, index)); });

  py::class_<Config>(m, "Config")
      .def_readwrite("blocking", &Config::blocking)
      .def_readwrite("cga_cluster_size", &Config::cga_cluster_size)
      .def_readwrite("min_ctas", &Config::min_ctas)
      .def_readwrite("max_ctas", &Config::max_ctas)
      .def_readwrite("split_share", &Config::split_share)
      .def_readwrite("traffic_class", &Config::traffic_class)
      .def_readwrite("net_name", &Config::net_name);
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(m, "Group")
      .def("_shutdown", [](Group&) {}, py::call_guard<py::gil_scoped_release>())
      .def("abort", [](Group&) {})
      .def_property_readonly("options", &Group::options)
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options,
                        bool on_device) {
        return c10::make_intrusive<Group>(std::move(store), rank, size, std::move(options), on_device);
      }));
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("config", &Options::config)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
}
