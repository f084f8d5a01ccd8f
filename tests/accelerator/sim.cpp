// A simulated accelerator on PyTorch's PrivateUse1 key: memory, streams, events, pinned memory, generators.
//
// Queues of kernels, their schedule and the detection of races are in simulator.py, which the callbacks reach;
// kernels are in device.py.
//
// [Note: two mappings]
// Device memory is one memfd, mapped twice. Tensors point into a mapping without access, so that host code that
// touches device memory faults, as it would with CUDA; kernels use the second mapping, which is writable.
//
// [Note: reuse]
// A block that is freed goes to the stream that allocated it, and is lent again at once, first fit: that stream
// runs its kernels in order, so whatever it still has queued for the block comes first. Another stream's use is
// known by record_stream only: such a block is parked until simulator.py says that the stream has passed.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;
constexpr int64_t kStreamsPerDevice = 1 << 20;  // stream id = device * kStreamsPerDevice + number; 0 is the default
constexpr size_t kPoisonNbytes = size_t(64) << 20;  // larger blocks are not poisoned: it would take too long
constexpr int kPoison = 0xFF;                       // NaN in every floating type

struct Callbacks {
  void (*record)(int64_t event, int64_t stream);
  void (*block)(int64_t event, int64_t stream);
  int (*query)(int64_t event, int64_t stream);                         // one of them is -1
  void (*synchronize)(int64_t event, int64_t stream, int64_t device);  // two of them are -1
  void (*reused)(int64_t address, int64_t nbytes, int64_t stream);
  double (*elapsed_ms)(int64_t begin, int64_t end);
  void (*make_room)();
} calls{};

int n_devices = 1;
thread_local int current_device = 0;
thread_local std::array<int64_t, kMostDevices> current_stream = [] {
  std::array<int64_t, kMostDevices> streams{};
  for (int d = 0; d < kMostDevices; ++d) streams[d] = d * kStreamsPerDevice;
  return streams;
}();
std::atomic<int64_t> next_stream{1}, next_event{1};

char *guarded = nullptr, *writable = nullptr;  // see [Note: two mappings]
size_t device_nbytes = 0;                      // of one device; its part of the mapping begins at device * this

// What ended since simulator.py asked last. Destructors may run while a Python exception is on its way, so they
// call nobody.
struct Parked {
  char* p;
  std::vector<int64_t> streams;
};
std::mutex ended_lock;
std::atomic<int64_t> n_ended{0};
std::vector<int64_t> destroyed_events;
std::vector<Parked> parked;

// --- device memory -----------------------------------------------------------------------------------------
struct Memory final : c10::DeviceAllocator {
  struct Block {
    size_t nbytes;
    int64_t stream;
    int device;
    std::vector<int64_t> used_by;  // other streams, as record_stream told
  };
  std::mutex lock;
  std::array<size_t, kMostDevices> top{};
  std::map<int64_t, std::map<char*, size_t>> free_blocks;  // by stream, in the order of addresses
  std::map<char*, Block> live, waiting;
  std::array<int64_t, kMostDevices> live_nbytes{}, peak_nbytes{};

  static size_t rounded(size_t n) {  // as CUDA's caching allocator rounds
    size_t grain = n > (size_t(1) << 20) ? size_t(2) << 20 : 512;
    return (n + grain - 1) / grain * grain;
  }

  char* first_fit(int64_t stream, size_t size) {
    auto& kept = free_blocks[stream];
    for (auto at = kept.begin(); at != kept.end(); ++at) {
      if (at->second < size) continue;
      char* p = at->first;
      size_t rest = at->second - size;
      kept.erase(at);
      if (rest) kept[p + size] = rest;
      return p;
    }
    return nullptr;
  }

  char* fresh(int device, size_t size) {
    if (top[device] + size > device_nbytes) return nullptr;
    char* p = guarded + device * device_nbytes + top[device];
    top[device] += size;
    if (size <= kPoisonNbytes) std::memset(p - guarded + writable, kPoison, size);
    return p;
  }

  c10::DataPtr allocate(size_t n) override {
    int device = current_device;
    c10::Device where(kSim, device);
    if (n == 0) return {nullptr, where};
    int64_t stream = current_stream[device];
    size_t size = rounded(n);
    bool reused = true;
    char* p = nullptr;
    for (int attempt = 0; attempt < 2 && p == nullptr; ++attempt) {
      if (attempt == 1) calls.make_room();  // wait for the streams that parked blocks wait for
      std::lock_guard<std::mutex> guard(lock);
      p = first_fit(stream, size);
      if (p == nullptr) {
        p = fresh(device, size);
        reused = false;
      }
      if (p == nullptr) continue;
      live[p] = {size, stream, device, {}};
      live_nbytes[device] += int64_t(size);
      peak_nbytes[device] = std::max(peak_nbytes[device], live_nbytes[device]);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, p != nullptr, "sim: out of memory: tried to allocate ", n, " bytes; device ",
                     device, " has ", device_nbytes, ", of which ", live_nbytes[device], " are in use");
    if (reused) calls.reused(int64_t(p), int64_t(size), stream);
    return {p, p, &Memory::release, where};
  }
  static void release(void* p);
  void give_back(char* p, const Block& block) {  // the lock is held
    auto& kept = free_blocks[block.stream];
    auto at = kept.emplace(p, block.nbytes).first;
    auto next = std::next(at);
    if (next != kept.end() && at->first + at->second == next->first) {
      at->second += next->second;
      kept.erase(next);
    }
    if (at != kept.begin()) {
      auto before = std::prev(at);
      if (before->first + before->second == at->first) {
        before->second += at->second;
        kept.erase(at);
      }
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: copy_data"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> guard(lock);
    auto found = live.find(static_cast<char*>(data.get_context()));
    if (found == live.end()) return;
    Block& block = found->second;
    bool known = std::count(block.used_by.begin(), block.used_by.end(), stream.id());
    if (stream.id() != block.stream && !known) block.used_by.push_back(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> guard(lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = live_nbytes[d];
    stats.allocated_bytes[0].peak = peak_nbytes[d];
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = int64_t(top[d]);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> guard(lock);
    peak_nbytes[d] = live_nbytes[d];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    std::lock_guard<std::mutex> guard(lock);
    return {device_nbytes - size_t(live_nbytes[d]), device_nbytes};
  }
} memory;

void Memory::release(void* context) {
  char* p = static_cast<char*>(context);
  if (p == nullptr) return;
  std::lock_guard<std::mutex> guard(memory.lock);
  auto found = memory.live.find(p);
  if (found == memory.live.end()) return;
  Block block = std::move(found->second);
  memory.live.erase(found);
  memory.live_nbytes[block.device] -= int64_t(block.nbytes);
  if (block.used_by.empty()) {
    memory.give_back(p, block);
    return;
  }
  std::lock_guard<std::mutex> ended(ended_lock);
  parked.push_back({p, block.used_by});
  memory.waiting[p] = std::move(block);
  ++n_ended;
}

// --- pinned memory: ranges that were registered, and blocks of the pinned allocator -------------------------
struct Pinned final : c10::Allocator {
  std::mutex lock;
  std::map<const char*, size_t> ranges;
  bool has(const void* address) {
    std::lock_guard<std::mutex> guard(lock);
    auto p = static_cast<const char*>(address);
    auto after = ranges.upper_bound(p);
    if (after == ranges.begin()) return false;
    --after;
    return p < after->first + after->second;
  }
  bool add(const char* p, size_t n) {  // as CUDA: registering again what is registered is an error
    std::lock_guard<std::mutex> guard(lock);
    auto after = ranges.lower_bound(p);
    if (after != ranges.end() && after->first < p + n) return false;
    if (after != ranges.begin()) {
      auto before = std::prev(after);
      if (p < before->first + before->second) return false;
    }
    ranges[p] = n;
    return true;
  }
  bool remove(const char* p) {
    std::lock_guard<std::mutex> guard(lock);
    return ranges.erase(p) > 0;
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? ::aligned_alloc(4096, (n + 4095) / 4096 * 4096) : nullptr;
    if (p) add(static_cast<char*>(p), n);
    return {p, p, &Pinned::release, c10::Device(c10::kCPU)};
  }
  static void release(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return &Pinned::release; }
  void copy_data(void* d, const void* s, size_t n) const override { default_copy_data(d, s, n); }
} pinned;

void Pinned::release(void* p) {
  pinned.remove(static_cast<char*>(p));
  ::free(p);
}

// --- generators: a seed and an offset, as Philox has; each kernel that draws takes one offset ---------------
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Generator(int device)
      : c10::GeneratorImpl(c10::Device(kSim, c10::DeviceIndex(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "sim: the state of a generator is 16 bytes of uint8 on the CPU");
    auto from = static_cast<const char*>(state.data());
    std::memcpy(&seed_, from, 8);
    std::memcpy(&offset_, from + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto to = static_cast<char*>(state.data_ptr());
    std::memcpy(to, &seed_, 8);
    std::memcpy(to + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
};

const at::Generator& default_generator(int device) {
  static std::array<at::Generator, kMostDevices> all = [] {
    std::array<at::Generator, kMostDevices> made;
    for (int d = 0; d < kMostDevices; ++d) made[d] = at::make_generator<Generator>(d);
    return made;
  }();
  return all[device < 0 ? current_device : device];
}

// --- streams, events, devices ------------------------------------------------------------------------------
c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, c10::DeviceIndex(device)), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(kSim, c10::DeviceIndex(current_device)); }
  void setDevice(c10::Device d) const override {
    if (!d.has_index()) return;
    TORCH_CHECK(d.index() < n_devices, "sim: invalid device ordinal ", int(d.index()), " of ", n_devices);
    current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current_device = d.index();
  }
  static int at(c10::Device d) { return d.has_index() ? d.index() : current_device; }
  c10::Stream getStream(c10::Device d) const override { return stream_of(at(d), current_stream[at(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(at(d), at(d) * kStreamsPerDevice); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return stream_of(at(d), at(d) * kStreamsPerDevice + next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    int d = s.device_index();
    auto old = stream_of(d, current_stream[d]);
    current_stream[d] = s.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(n_devices); }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*e == nullptr) *e = reinterpret_cast<void*>(next_event++);
    calls.record(int64_t(*e), s.id());
  }
  void block(void* e, const c10::Stream& s) const override {
    if (e) calls.block(int64_t(e), s.id());
  }
  bool queryEvent(void* e) const override { return !e || calls.query(int64_t(e), -1); }
  bool queryStream(const c10::Stream& s) const override { return calls.query(-1, s.id()); }
  void synchronizeStream(const c10::Stream& s) const override { calls.synchronize(-1, s.id(), -1); }
  void synchronizeEvent(void* e) const override {
    if (e) calls.synchronize(int64_t(e), -1, -1);
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    calls.synchronize(-1, -1, d < 0 ? current_device : d);
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override {
    if (!e) return;
    std::lock_guard<std::mutex> guard(ended_lock);
    destroyed_events.push_back(int64_t(e));
    ++n_ended;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    memory.recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return calls.elapsed_ms(int64_t(a), int64_t(b));
  }
} guard;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(n_devices); }
  void setCurrentDevice(c10::DeviceIndex d) const override { guard.setDevice(c10::Device(kSim, d)); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return guard.exchangeDevice(c10::Device(kSim, d)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return pinned.has(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void* p) const override {
    size_t at = size_t(static_cast<char*>(p) - guarded);
    return c10::Device(kSim, c10::DeviceIndex(at / device_nbytes));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device : d);
  }
} hooks;

// --- the few operators that make tensors of storages; all others are in device.py ---------------------------
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard held(device.value_or(guard.getDevice()));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard held(device.value_or(guard.getDevice()));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor& set_storage(at::Tensor& self, at::Storage from, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(from), offset, size, stride);
}
at::Tensor& set_whole(at::Tensor& self, at::Storage from) {
  int64_t n = int64_t(from.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(from), 0, {n}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true);
  return set_storage(self, std::move(none), 0, {0}, {1});
}
void record_stream(at::Tensor& self, at::Stream stream) { memory.recordStream(self.storage().data_ptr(), stream); }

// torch lets p.data of a CPU parameter become a tensor of CUDA and of other back ends that it names; of ours, too.
bool compatible(const at::Tensor& a, const at::Tensor& b) {
  auto dense = [](const at::Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || t.is_privateuseone()); };
  return dense(a) && dense(b);
}

// A view of the same bytes for the CPU's kernels, through the writable mapping; it holds nothing alive.
at::Tensor kernel_view(const at::Tensor& t) {
  c10::InferenceMode never(false);
  if (t.numel() == 0 || !t.has_storage() || t.storage().nbytes() == 0)
    return at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
  char* p = static_cast<char*>(const_cast<void*>(t.storage().data())) - guarded + writable;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(p, c10::Device(c10::kCPU)),
                       nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

// A number in the place of a tensor, as torch makes of the 2 in `x * 2`: it does not decide the result's type.
at::Tensor wrapped_number(const at::Scalar& s) {
  auto type = s.isBoolean() ? at::kBool : s.isIntegral(false) ? at::kLong : s.isComplex() ? at::kComplexDouble : at::kDouble;
  auto t = at::detail::empty_cpu({}, type);
  if (type == at::kBool) *static_cast<bool*>(t.data_ptr()) = s.toBool();
  if (type == at::kLong) *static_cast<int64_t*>(t.data_ptr()) = s.toLong();
  if (type == at::kDouble) *static_cast<double*>(t.data_ptr()) = s.toDouble();
  if (type == at::kComplexDouble) *static_cast<c10::complex<double>*>(t.data_ptr()) = s.toComplexDouble();
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

std::tuple<int64_t, int64_t> take_seed(std::optional<at::Generator> given, int64_t device) {
  at::Generator g = given.has_value() && given->defined() ? *given : default_generator(int(device));
  std::lock_guard<std::mutex> held(g.mutex());
  auto* generator = static_cast<Generator*>(g.unsafeGetGeneratorImpl());
  return {int64_t(generator->seed_), int64_t(generator->offset_++)};
}

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                       double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &math_attention)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", compatible);
}
TORCH_LIBRARY(sim, m) {
  m.def("kernel_view(Tensor t) -> Tensor", kernel_view);
  m.def("wrapped_number(Scalar s) -> Tensor", wrapped_number);
  m.def("take_seed(Generator? generator, int device) -> (int, int)", take_seed);
}

extern "C" {
int sim_start(size_t nbytes, int devices, Callbacks given) {
  if (devices < 1 || devices > kMostDevices) return 1;
  size_t total = nbytes * size_t(devices);
  int fd = memfd_create("sim", 0);
  if (fd < 0 || ftruncate(fd, off_t(total)) != 0) return 2;
  void* no_access = mmap(nullptr, total, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  void* access = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  if (no_access == MAP_FAILED || access == MAP_FAILED) return 3;
  guarded = static_cast<char*>(no_access);
  writable = static_cast<char*>(access);
  device_nbytes = nbytes;
  n_devices = devices;
  calls = given;
  c10::impl::registerDeviceGuard(kSim, &guard);
  c10::SetAllocator(kSim, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return 0;
}
int64_t sim_current_stream(int device) { return current_stream[device < 0 ? current_device : device]; }
int sim_current_device() { return current_device; }
int64_t sim_n_ended() { return n_ended; }
// One event that was destroyed; 0: there is none.
int64_t sim_destroyed_event() {
  std::lock_guard<std::mutex> guard(ended_lock);
  if (destroyed_events.empty()) return 0;
  auto event = destroyed_events.back();
  destroyed_events.pop_back();
  --n_ended;
  return event;
}
// The streams (at most `most`) that a freed block waits for; its address in `block`. 0: there is no such block.
int sim_parked(int64_t* block, int64_t* streams, int most) {
  std::lock_guard<std::mutex> guard(ended_lock);
  if (parked.empty()) return 0;
  auto each = std::move(parked.back());
  parked.pop_back();
  --n_ended;
  int n = std::min<int>(most, int(each.streams.size()));
  std::copy_n(each.streams.begin(), n, streams);
  *block = int64_t(each.p);
  return n;
}
// Lend a parked block again; returns its stream.
int64_t sim_unpark(int64_t block) {
  std::lock_guard<std::mutex> guard(memory.lock);
  auto found = memory.waiting.find(reinterpret_cast<char*>(block));
  int64_t stream = found->second.stream;
  memory.give_back(found->first, found->second);
  memory.waiting.erase(found);
  return stream;
}
// Seed and offset of a device's default generator: set if `put`, else told.
void sim_generator(int device, uint64_t* seed, uint64_t* offset, int put) {
  auto* generator = static_cast<Generator*>(default_generator(device).unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> held(generator->mutex_);
  (put ? generator->seed_ : *seed) = put ? *seed : generator->seed_;
  (put ? generator->offset_ : *offset) = put ? *offset : generator->offset_;
}
int64_t sim_writable(int64_t address) { return int64_t(writable) + (address - int64_t(guarded)); }
int sim_is_pinned(int64_t p) { return pinned.has(reinterpret_cast<void*>(p)); }
// cudaHostRegister's and cudaHostUnregister's codes: 712 and 713 are "already" and "not registered".
int sim_register(int64_t p, size_t n) { return pinned.add(reinterpret_cast<char*>(p), n) ? 0 : 712; }
int sim_unregister(int64_t p) { return pinned.remove(reinterpret_cast<char*>(p)) ? 0 : 713; }
}
