// Small tensors on the stand-in have values: after an operator whose inputs are known and small has "run" there, it runs
// on the host, on the same memory, and its results are put where the kernel would have put them. An observer does
// this, not a dispatch mode: under a mode, autograd would choose other formulas, which allocate other memory.
//
// Which bytes of the device are known is kept in ranges. Memory that is allocated is not known until something known is
// written to it, so nothing ever reads what was there before.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/unique_dim.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>

#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<IValue>;

constexpr size_t kMostBytes = 1 << 20, kMostIntegerBytes = 16 << 20;

// Ranges of addresses whose bytes are known.
class Known {
   public:
    void set(uintptr_t begin, uintptr_t end, bool known) {
        if (begin == end) return;
        std::lock_guard<std::mutex> held(lock_);
        auto bound = bounds_.lower_bound(begin);
        if (bound != bounds_.begin() && std::prev(bound)->second.first > begin) --bound;
        bounds_.erase(bound, bounds_.lower_bound(end));
        auto it = ranges_.upper_bound(begin);
        if (it != ranges_.begin() && std::prev(it)->second >= begin) --it;
        while (it != ranges_.end() && it->first <= end) {
            const auto [first, last] = *it;
            it = ranges_.erase(it);
            if (known) { begin = std::min(begin, first); end = std::max(end, last); continue; }
            if (first < begin) ranges_[first] = begin;
            if (last > end) { ranges_[end] = last; break; }
        }
        if (known) ranges_[begin] = end;
    }
    bool has(uintptr_t begin, uintptr_t end) {
        std::lock_guard<std::mutex> held(lock_);
        auto it = ranges_.upper_bound(begin);
        return it != ranges_.begin() && std::prev(it)->second >= end;
    }
    // The most that whole numbers can be which are not known; until something is written there.
    void set_most(uintptr_t begin, uintptr_t end, long most) {
        std::lock_guard<std::mutex> held(lock_);
        bounds_[begin] = {end, most};
    }
    long most(uintptr_t at) {
        std::lock_guard<std::mutex> held(lock_);
        const auto it = bounds_.upper_bound(at);
        return it == bounds_.begin() || std::prev(it)->second.first <= at ? -1 : std::prev(it)->second.second;
    }

   private:
    std::mutex lock_;
    std::map<uintptr_t, uintptr_t> ranges_;
    std::map<uintptr_t, std::pair<uintptr_t, long>> bounds_;
};

Known known;
thread_local bool checks_repeats = false;  // whether this thread is in `repeat_interleave`
thread_local bool busy = false;  // this thread computes values: what it calls is not observed

// Questions to Python: values that were not computed. See values.py.
long (*ask_selected)(const char* op, long elements) = nullptr;
double (*ask_read)(const char* dtype, long elements) = nullptr;
void (*say_chosen)(const char* op) = nullptr;
long (*assume_finite)(const char* op) = nullptr;
void (*answer_reads)(long value, int set) = nullptr;

struct Operator {
    c10::OperatorHandle handle;
    std::string name;
    bool computed = false, random = false, takes_generator = false, returns_written = false, ignores_written = false;
    std::vector<bool> written;  // by argument
};

// Operators that only make room, or whose memory is not that of their tensors.
const std::unordered_set<std::string> kSkipped = {
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::resize_", "aten::set_", "aten::record_stream",
    "aten::is_pinned", "aten::_pin_memory", "aten::_local_scalar_dense", "aten::_cudnn_init_dropout_state"};
// Operators that write without reading what was there.
const std::unordered_set<std::string> kOnlyWrites = {
    "aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
    "aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_"};
// Operators that write elements which they are told. Where these are all, it does not matter what was there.
const std::unordered_set<std::string> kWritesSome = {"aten::scatter_", "aten::index_put_", "aten::index_copy_"};
// Operators that read numbers on the host to know how large their results are; `equal` returns it, and `normal` checks
// that no deviation is negative, `repeat_interleave` that no number of repeats is.
const std::unordered_set<std::string> kReadFirst = {"aten::nonzero", "aten::_unique2", "aten::unique_consecutive",
                                                    "aten::unique_dim", "aten::unique_dim_consecutive", "aten::_coalesce",
                                                    "aten::equal", "aten::normal", "aten::bincount",
                                                    "aten::repeat_interleave"};
// Operators whose results have no larger whole numbers than these arguments of theirs; in sums, than their sums.
const std::unordered_map<std::string, std::vector<size_t>> kBounded = {
    {"aten::copy_", {1}}, {"aten::index", {0}}, {"aten::index_select", {0}}, {"aten::gather", {0}}, {"aten::flip", {0}},
    {"aten::masked_select", {0}}, {"aten::cat", {0}}, {"aten::max", {0}}, {"aten::amax", {0}}, {"aten::min", {0}},
    {"aten::amin", {0}}, {"aten::_aminmax", {0}}, {"aten::aminmax", {0}}, {"aten::sort", {0}}, {"aten::topk", {0}},
    {"aten::sum", {0}}, {"aten::cumsum", {0}},
    {"aten::add", {0, 1}}, {"aten::add_", {0, 1}}, {"aten::where", {1, 2}}, {"aten::masked_fill", {0, 2}},
    {"aten::masked_fill_", {0, 2}}};
// Operators that choose indices, their only or last result; without a dimension, `max` and `min` choose none.
const std::unordered_set<std::string> kChooses = {"aten::argmax", "aten::argmin", "aten::multinomial", "aten::max",
                                                  "aten::min", "aten::topk", "aten::sort"};
const char* const kUnscale = "aten::_amp_foreach_non_finite_check_and_unscale_";

Operator describe(const c10::OperatorName& name) {
    Operator it{c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str()), name.name};
    const c10::FunctionSchema& schema = it.handle.schema();
    bool views = false, writes = false;
    for (const auto& result : schema.returns()) {
        if (!result.alias_info()) continue;
        if (result.alias_info()->isWrite()) it.returns_written = true;
        else views = true;
    }
    for (const auto& argument : schema.arguments()) {
        it.written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
        writes |= it.written.back();
        it.takes_generator |= argument.name() == "generator";
        it.ignores_written |= it.written.back() && argument.is_out();
    }
    it.ignores_written |= kOnlyWrites.count(name.name) > 0;
    it.random = it.takes_generator || it.handle.hasTag(at::Tag::nondeterministic_seeded);
    it.computed = name.name.rfind("aten::", 0) == 0 && !kSkipped.count(name.name) && !views &&
                  !it.handle.hasTag(at::Tag::inplace_view) && (writes || !schema.returns().empty()) &&
                  (it.handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA) || name.name == "aten::copy_");
    return it;
}

const Operator* operator_of(const at::RecordFunction& fn) {
    thread_local std::unordered_map<c10::OperatorName, Operator> all;
    auto name = fn.operator_name();
    if (!name) return nullptr;
    auto found = all.find(*name);
    if (found == all.end()) found = all.emplace(*name, describe(*name)).first;
    return &found->second;
}

// A tensor whose elements lie in the device's memory as its sizes and strides say.
bool is_plain(const Tensor& it) {
    const c10::TensorImpl* impl = it.unsafeGetTensorImpl();
    return it.layout() == c10::kStrided && !impl->is_python_dispatch() && impl->has_storage() && !it.is_quantized() &&
           !it.is_conj() && !it.is_neg() && !it._is_zerotensor() &&
           !impl->key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::NestedTensor, c10::DispatchKey::Functionalize}));
}

size_t span(const Tensor& it) {
    if (!it.numel()) return 0;
    int64_t last = 1;
    for (int64_t dim = 0; dim < it.dim(); ++dim) last += (it.size(dim) - 1) * it.stride(dim);
    return size_t(last) * it.element_size();
}

uintptr_t begin_of(const Tensor& it) { return it.numel() ? uintptr_t(it.const_data_ptr()) : 0; }

// Call with each range of a tensor's bytes, until a call says no: all at once, or element by element in a part of a
// tensor. False if a call said so, or the part has too many elements.
template <class F>
bool each_range(const Tensor& it, F&& call) {
    const uintptr_t begin = begin_of(it);
    if (it.dim() == 0 || it.is_non_overlapping_and_dense()) return call(begin, begin + span(it));
    if (it.numel() > 4096) return false;
    for (int64_t index = 0; index < it.numel(); ++index) {
        int64_t rest = index, offset = 0;
        for (int64_t dim = it.dim() - 1; dim >= 0; --dim) {
            offset += rest % it.size(dim) * it.stride(dim);
            rest /= it.size(dim);
        }
        const uintptr_t at = begin + size_t(offset) * it.element_size();
        if (!call(at, at + it.element_size())) return false;
    }
    return true;
}

bool is_known(const Tensor& it) {
    const auto has = [](uintptr_t begin, uintptr_t end) { return known.has(begin, end); };
    return !it.numel() || has(begin_of(it), begin_of(it) + span(it)) || each_range(it, has);
}
void forget(const Tensor& it) { known.set(begin_of(it), begin_of(it) + span(it), false); }

void learn(const Tensor& it) {
    const auto set = [](uintptr_t begin, uintptr_t end) { known.set(begin, end, true); return true; };
    if (!each_range(it, set)) forget(it);
}

Tensor on_host(const Tensor& it) {
    auto options = at::TensorOptions().dtype(it.dtype()).device(c10::kCPU);
    return at::from_blob(it.numel() ? it.data_ptr() : nullptr, it.sizes(), it.strides(), options);
}

// What runs on the host is not observed, not differentiated, not cast.
struct Apart {
    Apart() { busy = true; }
    ~Apart() { busy = false; }
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
    at::DisableRecordFunctionGuard unobserved;
};

const at::Generator& numbers() {
    static at::Generator it = at::detail::createCPUGenerator(0);
    return it;
}

struct Observed : at::ObserverContext {
    const Operator* op = nullptr;
    Stack arguments;  // on the host, where values are computed
    Stack selected_from;  // the inputs of an operator that selects by a mask, which is known once it was asked for
    Tensor over_zeros;  // the argument of an operator that writes some elements, if what was there is not known
    bool computes = true, done = false, reads = false;
    std::optional<bool> found;  // of an operator that looks for values that are not finite, in those that are
    std::optional<bool> dominated;  // of `and` and `or`, what one known mask makes of all
    size_t bytes = 0;
    bool integers = true;
    long selectable = 0, selected = 0;
    int64_t choices = 0;
    long most = -1;  // that a whole number in the result can be, if it is not known; -1 if it can be any
    int64_t along = 0;  // the dimension whose rows `unique` compares
    std::vector<Tensor> device_written, host_written;  // of operators that do not return what they write
};

bool take(Observed& it, const Tensor& tensor, bool written, Tensor& out) {
    out = tensor;
    if (!tensor.defined()) return true;
    if (!tensor.is_cuda()) return is_plain(tensor) && tensor.device().is_cpu();
    if (!is_plain(tensor)) return false;
    it.bytes += span(tensor);
    it.integers &= c10::isIntegralType(tensor.scalar_type(), true);
    if (it.bytes > (it.integers ? kMostIntegerBytes : kMostBytes)) return false;
    out = on_host(tensor);
    if (written) out = out.clone();
    if ((written && it.op->ignores_written) || is_known(tensor)) return true;
    if (!written || !kWritesSome.count(it.op->name)) return false;
    it.over_zeros = out.zero_();
    return true;
}

// The argument on the host; false if it is not known, or too large.
bool take(Observed& it, const IValue& value, bool written, bool is_generator, IValue& out) {
    out = value;
    if (is_generator) {
        out = numbers();
    } else if (value.isTensor()) {
        Tensor tensor;
        if (!take(it, value.toTensor(), written, tensor)) return false;
        out = tensor;
    } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) {
            Tensor tensor;
            if (!take(it, each, written, tensor)) return false;
            list.push_back(tensor);
        }
        out = list;
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const IValue& each : value.toListRef()) {
            Tensor tensor;
            if (!each.isNone() && !take(it, each.toTensor(), written, tensor)) return false;
            list.push_back(each.isNone() ? std::nullopt : std::optional<Tensor>(tensor));
        }
        out = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
        out = c10::Device(c10::kCPU);
    }
    return true;
}

// The arguments of an operator that writes none; false if one is not known.
bool take_all(Observed& it, const Stack& inputs) {
    it.bytes = 0;
    for (const IValue& input : inputs) {
        IValue host;
        if (!take(it, input, false, false, host)) return false;
        it.arguments.push_back(host);
    }
    return true;
}

template <class F>
void each_tensor(const IValue& value, F&& call) {
    if (value.isTensor()) {
        if (value.toTensor().defined()) call(value.toTensor());
    } else if (value.isTensorList()) {
        for (const Tensor& each : value.toTensorVector()) if (each.defined()) call(each);
    } else if (value.isOptionalTensorList()) {
        for (const IValue& each : value.toListRef()) if (!each.isNone() && each.toTensor().defined()) call(each.toTensor());
    }
}

// Run the operator on the host; its results replace the arguments.
bool compute(Observed& it) {
    Apart apart;
    const bool draws = it.op->random && !it.op->takes_generator;
    at::Generator shared = at::detail::getDefaultCPUGenerator();
    Tensor before;
    if (draws) {  // it draws from the program's own generator of the host, which must not notice
        before = shared.get_state();
        shared.set_state(numbers().get_state());
    }
    bool done = true;
    try {
        Tensor over_ones;
        if (it.over_zeros.defined()) {
            Stack again = it.arguments;
            again[0] = over_ones = it.over_zeros.clone().fill_(1);
            it.op->handle.callBoxed(&again);
        }
        it.op->handle.callBoxed(&it.arguments);
        done = !over_ones.defined() || over_ones.equal(it.over_zeros);
    } catch (...) {
        done = false;
    }
    if (draws) {
        at::Generator ours = numbers();
        ours.set_state(shared.get_state());
        shared.set_state(before);
    }
    return done;
}

bool under_a_mode() {
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return included.has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                                 c10::DispatchKey::FuncTorchDynamicLayerFrontMode}));
}

// What `and` and `or` of masks are everywhere, whatever the one that is not known has.
std::optional<bool> dominated(const Operator& op, c10::ArrayRef<const IValue> inputs) {
    const bool joins = op.name.rfind("aten::bitwise_or", 0) == 0 || op.name.rfind("aten::logical_or", 0) == 0;
    if (!joins && op.name.rfind("aten::bitwise_and", 0) != 0 && op.name.rfind("aten::logical_and", 0) != 0) return std::nullopt;
    for (const IValue& value : inputs.slice(0, 2)) {
        if (!value.isTensor() || value.toTensor().scalar_type() != c10::kBool) return std::nullopt;
    }
    Apart apart;
    for (const IValue& value : inputs.slice(0, 2)) {
        const Tensor& mask = value.toTensor();
        if (!mask.is_cuda() || !is_plain(mask) || span(mask) > kMostIntegerBytes || !is_known(mask)) continue;
        if (on_host(mask).eq(joins).all().item<bool>()) return joins;
    }
    return std::nullopt;
}

// Whether an operator looks for values that are not finite: `x == inf`, `x != x`; and what it finds in those that are.
std::optional<bool> finds_in_finite(const Operator& op, c10::ArrayRef<const IValue> inputs) {
    if (op.name == "aten::isnan" || op.name == "aten::isposinf" || op.name == "aten::isneginf") return false;
    const bool equals = op.name == "aten::eq";
    if (!equals && op.name != "aten::ne") return std::nullopt;
    const bool same = inputs[1].isTensor() && inputs[1].toTensor().is_same(inputs[0].toTensor());
    if (!same && !(inputs[1].isDouble() && std::isinf(inputs[1].toDouble()))) return std::nullopt;
    return equals == same;
}

// The most that whole numbers can be: 1 in a mask, else by their values, or as was found when they were computed.
long greatest(const Tensor& it) {
    const bool on_host_already = it.device().is_cpu();
    if (!(on_host_already || it.is_cuda()) || !is_plain(it) || !it.numel() || !c10::isIntegralType(it.scalar_type(), true)) return -1;
    if (it.scalar_type() == c10::kBool) return 1;
    Apart apart;
    const bool values = span(it) <= kMostIntegerBytes && (on_host_already || is_known(it));
    return values ? on_host(it).max().item<long>() : known.most(begin_of(it));
}

// The same of the results of an operator whose arguments are not all known; of a sum, of each that it adds.
long greatest(const Operator& op, c10::ArrayRef<const IValue> inputs) {
    if (op.name == "aten::count_nonzero") return 1;
    const auto arguments = kBounded.find(op.name);
    if (arguments == kBounded.end()) return -1;
    const bool adds = op.name.rfind("aten::add", 0) == 0;
    if (adds && !(inputs.size() > 2 && inputs[2].isInt() && inputs[2].toInt() == 1)) return -1;
    long most = 0;
    const auto take_one = [&](long of_one) {
        most = most < 0 || of_one < 0 ? -1 : adds ? most + of_one : std::max(most, of_one);
    };
    for (const size_t index : arguments->second) {
        if (index >= inputs.size()) return -1;
        if (inputs[index].isInt()) take_one(long(inputs[index].toInt()));
        else if (!inputs[index].isTensor() && !inputs[index].isTensorList()) return -1;
        each_tensor(inputs[index], [&](const Tensor& it) { take_one(greatest(it)); });
    }
    return most;
}

// Tell the host's reads within the operator what its kernels would have counted.
void answer_first(Observed& it, const IValue& first_input) {
    if (it.op->name == "aten::normal") return answer_reads(1, 1);
    const Tensor& mask = first_input.toTensor();
    if (mask.layout() == c10::kSparse) {
        Apart apart;
        const Tensor indices = mask._indices();
        const long most = std::min<long>(long(indices.size(1)), long(c10::multiply_integers(mask.sizes().slice(0, mask.sparse_dim()))));
        const bool counts = is_plain(indices) && is_known(indices);
        return answer_reads(counts ? long(std::get<0>(at::unique_dim(on_host(indices), 1)).size(1))
                                   : ask_selected(it.op->name.c_str(), most), 1);
    }
    checks_repeats |= it.op->name == "aten::repeat_interleave";
    if (checks_repeats) return;
    if (it.op->name == "aten::bincount") {
        if (!it.computes && it.selectable && greatest(mask) < 0) answer_reads(ask_selected("aten::bincount", it.selectable) - 1, 1);
        return;
    }
    const bool counts_true = it.op->name == "aten::_unique2" && mask.scalar_type() == c10::kBool;
    if (it.computes) {
        const long trues = counts_true ? it.arguments[0].toTensor().sum().item<long>() : 0;
        it.computes = it.done = compute(it);
        if (!it.computes) return;
        if (counts_true) return answer_reads(trues, 1);
        const IValue& first = it.arguments[0];
        return answer_reads(first.isTensor() ? long(first.toTensor().size(it.along)) : long(first.toBool()), 1);
    }
    if (it.op->name == "aten::equal") return;
    if (counts_true) it.selectable = std::min(it.selectable, 2L);
    const long selected = it.selected = ask_selected(it.op->name.c_str(), it.selectable);
    if (counts_true) return answer_reads(selected == 1 ? long(mask.numel()) : selected / 2, 1);
    answer_reads(selected, 1);
    if (mask.scalar_type() != c10::kBool || !is_plain(mask) || size_t(mask.numel()) > kMostIntegerBytes) return;
    Apart apart;  // the mask selects as many when it is used again, as in backward
    on_host(mask).copy_(at::lt(at::arange(mask.numel()), int64_t(selected)).reshape(mask.sizes()));
    learn(mask);
}

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& fn) {
    if (busy || under_a_mode()) return nullptr;
    bool on_device = false;
    for (const IValue& value : fn.inputs()) each_tensor(value, [&](const Tensor& it) { on_device |= it.is_cuda(); });
    if (!on_device) return nullptr;
    const Operator* op = operator_of(fn);
    const bool foreign = op && op->name.rfind("aten::", 0) != 0 && op->name.rfind("c10d::", 0) != 0;  // c10d: nccl.cpp
    if (!op || (!op->computed && !foreign && !kReadFirst.count(op->name))) return nullptr;
    auto it = std::make_unique<Observed>();
    it->op = op;
    const auto inputs = fn.inputs();
    const auto& schema = op->handle.schema().arguments();
    {
        Apart apart;
        for (size_t index = 0; index < inputs.size(); ++index) {
            const bool written = index < op->written.size() && op->written[index];
            IValue host;
            const bool generator = op->random && index < schema.size() && schema[index].name() == "generator";
            it->computes = op->computed && it->computes && take(*it, inputs[index], written, generator, host);
            if (it->computes) it->arguments.push_back(host);
            if (!written || op->returns_written) continue;
            each_tensor(inputs[index], [&](const Tensor& t) { if (t.is_cuda() && is_plain(t)) it->device_written.push_back(t); });
            if (it->computes) each_tensor(host, [&](const Tensor& t) { it->host_written.push_back(t); });
        }
    }
    if (!it->computes) {
        it->arguments.clear();
        it->host_written.clear();
        it->dominated = dominated(*op, inputs);
        it->most = greatest(*op, inputs);
        if (op->name == "aten::index" || op->name == "aten::masked_select") it->selected_from.assign(inputs.begin(), inputs.end());
        it->found = it->dominated ? it->dominated : finds_in_finite(*op, inputs);
    }
    if (op->name == "aten::ge" && checks_repeats) it->dominated = it->found = true;
    if (op->name == "aten::copy_" && inputs.size() > 1 && inputs[0].isTensor() && inputs[0].toTensor().device().is_cpu())
        it->reads = !it->computes && inputs[1].toTensor().is_cuda() && is_plain(inputs[1].toTensor()) && !is_known(inputs[1].toTensor());
    if (inputs[0].isTensor() && inputs[0].toTensor().defined()) {
        const Tensor& first = inputs[0].toTensor();
        it->selectable = long(first.numel());
        int64_t dim = op->name == "aten::topk" ? 2 : 1;
        dim = inputs.size() > size_t(dim) && inputs[size_t(dim)].isInt() ? inputs[size_t(dim)].toInt() : -1;
        if (dim >= -first.dim() && dim < first.dim()) it->choices = first.size(dim);
        if (op->name == "aten::bincount") it->selectable = long(inputs[2].toInt());
        if (op->name.rfind("aten::unique_dim", 0) == 0) { it->along = dim; it->selectable = it->choices; }
    }
    if (kReadFirst.count(op->name)) answer_first(*it, inputs[0]);
    return it;
}

void put(const Tensor& out, const Tensor& value) {
    if (!out.is_cuda() || !is_plain(out)) return;
    if (out.sizes() != value.sizes() || out.scalar_type() != value.scalar_type()) return forget(out);
    on_host(out).copy_(value);
    learn(out);
}

// Keep the most that the whole numbers of a result can be.
void bound(const Observed& it, const Tensor& out) {
    if (it.most < 0 || !out.is_cuda() || !is_plain(out) || !out.numel() || !c10::isIntegralType(out.scalar_type(), false)) return;
    const bool sums = it.op->name == "aten::sum" || it.op->name == "aten::count_nonzero";
    const long added = sums ? it.selectable / long(out.numel()) : it.op->name == "aten::cumsum" ? long(it.choices) : 1;
    known.set_most(begin_of(out), begin_of(out) + span(out), it.most * added);
}

bool chooses(const Observed& it, const IValue& out, const std::vector<IValue>& outputs) {
    const bool without_values = outputs.size() == 1 && (it.op->name == "aten::max" || it.op->name == "aten::min");
    return kChooses.count(it.op->name) && &out == &outputs.back() && !without_values;
}

// Indices that were chosen by values that nobody computed: the first one, or, of several, spread over all.
void choose(const Observed& it, const Tensor& out) {
    if (out.scalar_type() != c10::kLong || !it.choices || span(out) > kMostIntegerBytes) return;
    Tensor index = at::arange(out.numel(), at::TensorOptions().dtype(c10::kLong)).reshape(out.sizes());
    if (it.op->name == "aten::topk") put(out, index.remainder(it.choices));
    else if (it.op->name == "aten::multinomial" || it.op->name == "aten::sort") put(out, index.remainder(out.size(-1)));
    else put(out, index.zero_());
    say_chosen(it.op->name.c_str() + 6);
}

// What `unique` returns beside values that nobody computed: each of them occurs as often as any other.
void count_evenly(const Observed& it, const std::vector<IValue>& outputs) {
    if (it.op->name.find("unique") == std::string::npos || !it.selected || outputs.size() < 3 ||
        size_t(it.selectable) * sizeof(long) > kMostIntegerBytes)
        return;
    const Tensor all = at::arange(it.selectable), &inverse = outputs[1].toTensor(), &counts = outputs[2].toTensor();
    if (inverse.numel() == it.selectable) put(inverse, all.remainder(it.selected).reshape(inverse.sizes()));
    if (counts.numel() == it.selected) put(counts, all.remainder(it.selected).bincount());
}

void end(const at::RecordFunction& fn, at::ObserverContext* context) {
    if (!context) return;
    Observed& it = *static_cast<Observed*>(context);
    if (kReadFirst.count(it.op->name)) answer_reads(0, 0);
    checks_repeats &= it.op->name != "aten::repeat_interleave";
    const auto& outputs = fn.outputs();
    Apart apart;
    if (!it.selected_from.empty()) it.computes = take_all(it, it.selected_from);
    const bool computed = it.computes && (it.done || compute(it));
    if (!computed) {
        const bool unscales = it.op->name == kUnscale;  // values that are not known are taken to be finite
        for (const IValue& out : outputs)
            each_tensor(out, [&](const Tensor& t) {
                if (t.is_cuda() && is_plain(t)) forget(t);
                if (!chooses(it, out, outputs)) bound(it, t);
                if (it.reads) t.fill_(ask_read(c10::toString(t.scalar_type()), long(t.numel())));
                else if (!t.is_cuda() || !is_plain(t)) return;
                else if (chooses(it, out, outputs)) choose(it, t);
                else if (it.found && span(t) <= kMostIntegerBytes && (it.dominated || assume_finite(it.op->name.c_str()))) {
                    on_host(t).fill_(*it.found);
                    learn(t);
                }
            });
        for (const Tensor& t : it.device_written)
            if (!(unscales && t.numel() == 1 && is_known(t))) forget(t);
        if (unscales) assume_finite(it.op->name.c_str());
        count_evenly(it, outputs);
        return;
    }
    for (size_t index = 0; index < it.device_written.size(); ++index) put(it.device_written[index], it.host_written[index]);
    for (size_t index = 0; index < outputs.size() && index < it.arguments.size(); ++index) {
        std::vector<Tensor> values;
        each_tensor(it.arguments[index], [&](const Tensor& t) { values.push_back(t); });
        size_t row = 0;
        each_tensor(outputs[index], [&](const Tensor& t) { if (row < values.size()) put(t, values[row++]); });
    }
}

}  // namespace

extern "C" {

// Begin to compute values. The functions are called with the questions of values.py; they may be called by any thread.
void tb_memplugin_values_start(long (*selected)(const char*, long), double (*read)(const char*, long),
                               void (*chosen)(const char*), long (*finite)(const char*)) {
    ask_selected = selected;
    ask_read = read;
    say_chosen = chosen;
    assume_finite = finite;
    answer_reads = reinterpret_cast<void (*)(long, int)>(dlsym(RTLD_DEFAULT, "standin_answer_reads"));
    at::addGlobalCallback(at::RecordFunctionCallback(start, end).needsInputs(true).needsOutputs(true).scopes(
        {at::RecordScope::FUNCTION}));
}

// Forget what was in memory that is allocated; once the devices' allocators are there.
void tb_memplugin_values_watch() {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
        if (entry.action_ == c10::cuda::CUDACachingAllocator::TraceEntry::ALLOC)
            known.set(uintptr_t(entry.addr_), uintptr_t(entry.addr_) + entry.size_, false);
    });
}

int tb_memplugin_values_known(uintptr_t at, size_t bytes) { return known.has(at, at + bytes); }
long tb_memplugin_values_most(uintptr_t at) { return known.most(at); }
void tb_memplugin_values_set(uintptr_t at, size_t bytes, int is_known) { known.set(at, at + bytes, is_known); }
}
