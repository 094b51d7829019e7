// What the parts of the fake device share: memory that is counted, and what the host did that a device would notice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fake {

constexpr int kDevices = 8;
constexpr size_t kRounding = 512;  // as torch's caching allocator rounds

struct Memory {
  int64_t allocated = 0, peak = 0, total = 0;  // bytes; total: of the device, 0: no end
  int64_t allocations = 0;  // since the beginning
};

struct Change {  // of memory: a block that came (bytes > 0) or went
  int64_t block, bytes;
  std::string op, label;
};

Memory& memory();
void trace(bool on);               // whether changes are kept
std::vector<Change> take_changes();
void set_label(std::string label);  // of what is allocated from now on, by any thread

// A graph is captured between these. Returns the most bytes there were of what it has let go of again.
void begin_capture();
int64_t end_capture();

// What is allocated between these is inside of one kernel, but for what is still there at the end.
void begin_fused();
void end_fused();

// Called where the host would wait for the device, with what for.
extern std::function<void(const std::string&)> on_wait;
void wait(const std::string& what);

int current_device();
void set_current_device(int index);
int64_t current_stream();
int64_t exchange_stream(int64_t id);
bool is_pinned(const void* data);
void register_pinned(uintptr_t data, size_t bytes);
void unregister_pinned(uintptr_t data);

// A mask selects so many elements; -1: it is an error to ask.
void set_selected(int64_t elements);

// Makes the device's kernels: of every op in `names` ("add.Tensor"); those in `any_device` take host scalars as well.
void install(const std::vector<std::string>& names, const std::vector<std::string>& any_device);

}  // namespace fake
