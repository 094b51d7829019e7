// The kernels of the fake device: each gets its results' shapes from torch's own "meta" kernels, and makes no number.
//
// What a CUDA build checks is checked: that all tensors are on one device (host scalars where TensorIterator takes
// them, as native_functions.yaml says), and, by the meta kernels, shapes, dtypes and overlaps.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/transformers/attention.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace fake {

extern thread_local std::string op_name;

namespace {

using c10::IValue;
using at::Tensor;

// Ops that read indices from the host as well.
const std::unordered_set<std::string> kHostIndices = {
    "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
// Ops whose tensors must be of one dtype, which their meta kernels do not all check.
const std::unordered_set<std::string> kOneType = {
    "aten::mm", "aten::mm.out", "aten::bmm", "aten::bmm.out", "aten::addmm", "aten::addmm.out", "aten::addmm_",
    "aten::baddbmm", "aten::baddbmm.out", "aten::baddbmm_", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention"};
std::unordered_set<std::string> any_device_ops;

// Tensors of an op's arguments on the meta device, one for each of the device's; those that share memory share it there.
struct Twins {
  c10::Device device{c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_device())};
  std::unordered_map<const c10::TensorImpl*, Tensor> twins;
  std::unordered_map<const c10::TensorImpl*, Tensor> originals;  // by twin
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> made;  // by meta storage of a result

  Tensor twin(const Tensor& tensor) {
    auto found = twins.find(tensor.unsafeGetTensorImpl());
    if (found != twins.end()) return found->second;
    auto& storage = storages[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(nullptr, c10::DeviceType::Meta),
          c10::GetAllocator(c10::DeviceType::Meta), true);
      made[storage.unsafeGetStorageImpl()] = tensor.storage();
    }
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), tensor.dtype());
    auto* own = result.unsafeGetTensorImpl();
    own->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    twins.emplace(tensor.unsafeGetTensorImpl(), result);
    originals.emplace(own, tensor);
    return result;
  }

  // A result on the device: an argument itself, a view of one, or new.
  Tensor real(const Tensor& meta) {
    if (!meta.defined() || !meta.is_meta()) return meta;
    auto found = originals.find(meta.unsafeGetTensorImpl());
    if (found != originals.end()) return found->second;
    auto& storage = made[meta.storage().unsafeGetStorageImpl()];
    if (!storage) {
      auto* allocator = c10::GetAllocator(c10::DeviceType::CUDA);
      auto before = current_device();
      set_current_device(device.index());
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(), meta.storage().nbytes(), allocator->allocate(meta.storage().nbytes()),
          allocator, true);
      set_current_device(before);
    }
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), meta.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
    return result;
  }

  // What an op wrote may have another size now.
  bool resized() {
    bool any = false;
    for (auto& [own, original] : originals) {
      auto meta = twins.at(original.unsafeGetTensorImpl());
      if (meta.sizes() == original.sizes() && meta.strides() == original.strides()) continue;
      any = true;
      auto bytes = meta.storage().nbytes();
      if (bytes > original.storage().nbytes()) {
        original.storage().set_data_ptr_noswap(c10::GetAllocator(c10::DeviceType::CUDA)->allocate(bytes));
        original.storage().set_nbytes(bytes);
      }
      original.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
    }
    return any;
  }
};

struct Check {
  const std::string& name;
  c10::optional<c10::Device> device;
  bool host_scalars, host_indices, one_type;
  c10::optional<at::ScalarType> type;

  void see(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      if (!device) device = tensor.device();
      if (!type) type = tensor.scalar_type();
      TORCH_CHECK(
          !one_type || *type == tensor.scalar_type(), name, ": expected tensors of the same dtype, but got ", *type,
          " and ", tensor.scalar_type());
      TORCH_CHECK(
          *device == tensor.device(), name, ": Expected all tensors to be on the same device, but found at least two "
          "devices, ", *device, " and ", tensor.device(), "!");
      return;
    }
    if ((host_scalars && tensor.dim() == 0) || host_indices || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
    TORCH_CHECK(
        false, name, ": Expected all tensors to be on the same device, but found at least two devices, cuda:",
        current_device(), " and ", tensor.device(), "! (shape ", tensor.sizes(), ")");
  }
  void see(const IValue& value) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& each : value.toTensorList()) see(each);
    else if (value.isList()) for (const IValue& each : value.toListRef()) if (each.isTensor()) see(each.toTensor());
  }
};

IValue to_twin(const IValue& value, Twins& twins, bool host_indices) {
  // Scalars of the host stay there: meta kernels take them as those of CUDA do.
  auto one = [&](const Tensor& tensor) {
    return tensor.defined() && (tensor.is_cuda() || host_indices) ? twins.twin(tensor) : tensor;
  };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(one(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<c10::optional<Tensor>> list;
    for (const c10::optional<Tensor>& each : value.toOptionalTensorList())
      list.push_back(each && each->defined() ? c10::optional<Tensor>(one(*each)) : each);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) {
    if (value.toDevice().has_index()) twins.device = value.toDevice();
    return c10::Device(c10::DeviceType::Meta);
  }
  if (value.isGenerator()) return IValue();
  return value;
}

IValue from_twin(const IValue& value, Twins& twins) {
  if (value.isTensor()) return twins.real(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorList()) list.push_back(twins.real(each));
    return list;
  }
  return value;
}

// ------------------------------------------------------------------------------------ results of calls seen before
// Meta kernels are mostly Python. A call with tensors of the same shapes, strides, types and overlaps, and the same
// other arguments, has results of the same kind.

struct Made {  // one tensor of a result
  enum { kNothing, kArgument, kView, kNew } what = kNothing;
  size_t index = 0;  // of the argument, or of the new memory
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  size_t bytes = 0;
  caffe2::TypeMeta dtype;
};

struct Outcome {
  bool list = false;
  std::vector<Made> tensors;
};

std::mutex outcomes_mutex;
std::unordered_map<std::string, std::vector<Outcome>> outcomes;

// What of a call decides its results, as bytes, with its tensors in order.
struct Key {
  std::string bytes;
  std::vector<Tensor> tensors;
  bool known = true;

  void put(const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); }
  void put(int64_t number) { put(&number, sizeof number); }
  void put(at::IntArrayRef numbers) {
    put(static_cast<int64_t>(numbers.size()));
    put(numbers.data(), numbers.size() * sizeof(int64_t));
  }
  void tensor(const Tensor& tensor) {
    if (!tensor.defined()) return put(-1);
    put(tensor.is_cuda() ? tensor.get_device() : -2);
    put(static_cast<int64_t>(tensor.scalar_type()));
    put(tensor.sizes());
    if (!tensor.is_cuda()) return put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    put(tensor.strides());
    put(tensor.storage_offset());
    put(static_cast<int64_t>(tensor.storage().nbytes()));
    int64_t same = -1, shared = -1;
    for (size_t each = 0; each < tensors.size(); ++each) {
      if (tensors[each].is_same(tensor)) same = each;
      if (tensors[each].is_alias_of(tensor)) shared = each;
    }
    put(same), put(shared);
    tensors.push_back(tensor);
  }
  void value(const IValue& value) {
    bytes.push_back(static_cast<char>(value.isTensor() ? 1 : value.isInt() ? 2 : value.isDouble() ? 3 : 4));
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isInt()) return put(value.toInt());
    if (value.isBool()) return put(value.toBool());
    if (value.isNone() || value.isGenerator()) return put(-3);
    if (value.isDevice()) return put(value.toDevice().index()), put(static_cast<int64_t>(value.toDevice().type()));
    if (value.isDouble()) {
      double number = value.toDouble();
      return put(&number, sizeof number);
    }
    if (value.isString()) return put(value.toStringRef().data(), value.toStringRef().size() + 1);
    if (value.isList()) {
      put(static_cast<int64_t>(value.toListRef().size()));
      for (const IValue& each : value.toListRef()) this->value(each);
      return;
    }
    known = false;
  }
};

Made describe(const Tensor& meta, Twins& twins, const Key& key, std::vector<const c10::StorageImpl*>& fresh) {
  Made made;
  if (!meta.defined()) return made;
  auto find = [&](auto matches) {
    for (size_t each = 0; each < key.tensors.size(); ++each)
      if (matches(key.tensors[each])) return static_cast<int64_t>(each);
    return int64_t{-1};
  };
  auto own = twins.originals.find(meta.unsafeGetTensorImpl());
  if (own != twins.originals.end()) {
    made.what = Made::kArgument;
    made.index = find([&](const Tensor& each) { return each.is_same(own->second); });
    return made;
  }
  auto* storage = meta.storage().unsafeGetStorageImpl();
  auto from = twins.made.find(storage);
  made.sizes = meta.sizes().vec(), made.strides = meta.strides().vec(), made.offset = meta.storage_offset();
  made.dtype = meta.dtype(), made.bytes = meta.storage().nbytes();
  auto shared = from == twins.made.end() ? -1 : find([&](const Tensor& each) {
    return each.storage().unsafeGetStorageImpl() == from->second.unsafeGetStorageImpl();
  });
  if (shared >= 0) {
    made.what = Made::kView, made.index = shared;
    return made;
  }
  made.what = Made::kNew;
  auto place = std::find(fresh.begin(), fresh.end(), storage);
  made.index = place - fresh.begin();
  if (place == fresh.end()) fresh.push_back(storage);
  return made;
}

Tensor make(const Made& made, const Key& key, std::vector<c10::Storage>& fresh, c10::Device device) {
  if (made.what == Made::kNothing) return {};
  if (made.what == Made::kArgument) return key.tensors[made.index];
  c10::Storage storage;
  if (made.what == Made::kView) {
    storage = key.tensors[made.index].storage();
  } else {
    if (fresh.size() <= made.index) {
      auto before = current_device();
      set_current_device(device.index());
      auto* allocator = c10::GetAllocator(c10::DeviceType::CUDA);
      fresh.emplace_back(c10::Storage::use_byte_size_t(), made.bytes, allocator->allocate(made.bytes), allocator, true);
      set_current_device(before);
    }
    storage = fresh[made.index];
  }
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), made.dtype);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes, made.strides, made.offset);
  return result;
}

// Give the results of a call that has been seen before. False if it has not been.
bool repeat(const Key& key, size_t count, torch::jit::Stack* stack) {
  std::vector<Outcome>* known = nullptr;
  {
    std::lock_guard<std::mutex> lock(outcomes_mutex);
    auto found = outcomes.find(key.bytes);
    if (found == outcomes.end()) return false;
    known = &found->second;  // stays where it is: entries are never changed
  }
  c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_device()));
  if (!key.tensors.empty()) device = key.tensors[0].device();
  std::vector<c10::Storage> fresh;
  std::vector<IValue> results;
  for (const Outcome& outcome : *known) {
    c10::List<Tensor> list;
    for (const Made& made : outcome.tensors) list.push_back(make(made, key, fresh, device));
    results.push_back(outcome.list ? IValue(list) : IValue(list.get(0)));
  }
  torch::jit::drop(*stack, count);
  for (auto& each : results) stack->push_back(std::move(each));
  return true;
}

void remember(const Key& key, Twins& twins, const torch::jit::Stack& stack, size_t results) {
  std::vector<Outcome> seen;
  std::vector<const c10::StorageImpl*> fresh;
  auto on_host = [](const Tensor& tensor) { return tensor.defined() && !tensor.is_meta(); };
  for (size_t place = stack.size() - results; place < stack.size(); ++place) {
    const IValue& value = stack[place];
    Outcome outcome;
    if (value.isTensor() && !on_host(value.toTensor())) {
      outcome.tensors.push_back(describe(value.toTensor(), twins, key, fresh));
    } else if (value.isTensorList()) {
      outcome.list = true;
      for (const Tensor& each : value.toTensorList()) outcome.tensors.push_back(describe(each, twins, key, fresh));
    } else {
      return;
    }
    seen.push_back(std::move(outcome));
  }
  std::lock_guard<std::mutex> lock(outcomes_mutex);
  outcomes.emplace(key.bytes, std::move(seen));
}

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto name = c10::toString(op.operator_name());
  auto outer = std::exchange(op_name, name);
  auto restore = c10::make_scope_exit([&] { op_name = outer; });
  auto count = schema.arguments().size();
  Key key;
  key.bytes = name;
  for (const IValue& each : torch::jit::last(*stack, count)) key.value(each);
  bool places = std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const auto& argument) {
    return argument.name() == "device";  // it says where results are
  });
  if (key.known && !places && repeat(key, count, stack)) return;
  Twins twins;
  Check check{name, {}, any_device_ops.count(name) > 0, kHostIndices.count(name) > 0, kOneType.count(name) > 0, {}};
  for (const IValue& each : torch::jit::last(*stack, count)) check.see(each);
  if (check.device) twins.device = *check.device;
  for (size_t place = stack->size() - count; place < stack->size(); ++place)
    (*stack)[place] = to_twin((*stack)[place], twins, check.host_indices);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  auto results = schema.returns().size();
  if (!twins.resized() && key.known && !places) remember(key, twins, *stack, results);
  for (size_t place = stack->size() - results; place < stack->size(); ++place)
    (*stack)[place] = from_twin((*stack)[place], twins);
}

// ------------------------------------------------------------------------------- what meta kernels cannot stand for

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  TORCH_CHECK(
      at::is_expandable_to(source.sizes(), self.sizes()), "copy_: a tensor of shape ", source.sizes(),
      " does not fit into one of shape ", self.sizes());
  if (self.is_cuda() && source.is_cuda()) {
    TORCH_CHECK(self.device() == source.device(), "copy_: from ", source.device(), " to ", self.device());
    return self;
  }
  const Tensor& host = self.is_cuda() ? source : self;
  TORCH_CHECK(host.is_cpu(), "copy_: from ", source.device(), " to ", self.device());
  if (host.numel() == 0) return self;
  bool waits = !non_blocking || !is_pinned(host.unsafeGetTensorImpl()->storage().data());
  if (self.is_cuda()) {
    if (waits) wait(non_blocking ? "a copy from memory that is not page-locked" : "a copy to the device");
    return self;
  }
  if (waits) wait(non_blocking ? "a copy to memory that is not page-locked" : "a copy to the host");
  at::AutoDispatchBelowADInplaceOrView below;
  return self.is_floating_point() ? self.fill_(1) : self.zero_();
}

at::Scalar local_scalar(const Tensor& self) {
  wait("a number");
  if (self.scalar_type() == at::kBool) return false;
  return at::isFloatingType(self.scalar_type()) ? at::Scalar(1.0) : at::Scalar(int64_t{0});
}

bool equal(const Tensor&, const Tensor&) {
  wait("a comparison");
  return true;
}

Tensor& set_storage(
    Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "set_: memory of ", source.device(), " for a tensor of ", self.device());
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(source);
  if (stride.empty() && !size.empty())
    own->set_sizes_contiguous(size), own->set_storage_offset(offset);
  else
    own->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor empty(
    at::IntArrayRef size, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
    c10::optional<at::Device> where, c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(where && where->has_index() ? *where : c10::Device(c10::DeviceType::CUDA, current_device()));
  return at::detail::empty_generic(
      size, c10::GetAllocator(c10::DeviceType::CUDA), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
    c10::optional<at::Device> where, c10::optional<bool>) {
  c10::DeviceGuard on(where && where->has_index() ? *where : c10::Device(c10::DeviceType::CUDA, current_device()));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(c10::DeviceType::CUDA), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype));
}

// As torch on CUDA chooses: flash, then memory-efficient attention, each where it is enabled and takes the tensors.
int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor&, const c10::optional<Tensor>& mask, double, bool,
    c10::optional<double>, bool) {
  auto& context = at::globalContext();
  auto dtype = query.scalar_type();
  bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  if (context.userEnabledFlashSDP() && half && query.size(-1) <= 256 && !mask)
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  if (context.userEnabledMemEfficientSDP() && dtype != at::kDouble && query.size(-3) == key.size(-3))
    return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return static_cast<int64_t>(at::SDPBackend::math);
}

int64_t selected = -1;

// What a mask selects is known to the device alone, and the host waits for it: here it is what was set.
Tensor masked_select(const Tensor& self, const Tensor& mask) {
  TORCH_CHECK(self.device() == mask.device(), "masked_select: ", self.device(), " and ", mask.device());
  TORCH_CHECK_NOT_IMPLEMENTED(selected >= 0, "masked_select: how much the mask selects is not known here");
  wait("what a mask selects");
  const int64_t all = c10::multiply_integers(at::infer_size(self.sizes(), mask.sizes()));
  TORCH_CHECK(selected <= all, "masked_select: ", selected, " of ", all, " elements");
  return at::empty({selected}, self.options());
}

void record_stream(Tensor&, c10::Stream) {}

// Give the memory of a tensor back and take another size: UntypedStorage.resize_, whose CUDA part is not in this build.
void resize_storage(const Tensor& tensor, int64_t bytes) {
  c10::DeviceGuard on(tensor.device());
  tensor.storage().set_data_ptr_noswap(c10::GetAllocator(c10::DeviceType::CUDA)->allocate(bytes));
  tensor.storage().set_nbytes(bytes);
}

const std::unordered_set<std::string> kOwn = {
    "copy_", "_local_scalar_dense", "equal", "set_.source_Storage_storage_offset", "set_.source_Storage",
    "set_.source_Tensor", "empty.memory_format", "empty_strided", "masked_select", "record_stream"};

}  // namespace

void set_selected(int64_t elements) { selected = elements; }

void install(const std::vector<std::string>& names, const std::vector<std::string>& any_device) {
  for (const auto& name : any_device) any_device_ops.insert("aten::" + name);
  static torch::Library library(
      torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, static_cast<uint32_t>(__LINE__));
  library.impl("copy_", &copy);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("equal", &equal);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("masked_select", &masked_select);
  library.impl("record_stream", &record_stream);
  for (const auto& name : names)
    if (!kOwn.count(name)) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  static torch::Library own(
      torch::Library::DEF, "fake_cuda", std::nullopt, __FILE__, static_cast<uint32_t>(__LINE__));
  own.def("resize_storage(Tensor tensor, int bytes) -> ()", &resize_storage);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}

}  // namespace fake
