// Fibers: the threads of an emulated block, how to switch between them, and what the sanitizers must be told of it.
// Under TSan a fiber is a thread of its own that only barriers and warp operations order, so that a race is reported
// whatever the schedule.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <string>
#include <vector>
#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#elif defined(__SANITIZE_THREAD__)
extern "C" {  // GCC ships these functions, not always their header
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#define SIMT_TSAN 1
#endif
#if !defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define SIMT_UCONTEXT 1  // the system's own switch, ten times slower than ours
#endif
#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace simt {

constexpr size_t kMaxSharedBytes = 227 * 1024;  // what a block can have on the largest GPUs
constexpr size_t kGuardBytes = 8192;            // poisoned under ASan: strips between the pieces, and what is beyond
constexpr size_t kStackBytes = 128 * 1024;
inline thread_local unsigned char dynamic_smem[kMaxSharedBytes + kGuardBytes] __attribute__((aligned(128)));

enum class Schedule : uint32_t { forward, reverse, random };  // in which fibers run between barriers, and blocks
struct Options {
  Schedule schedule = Schedule::forward;
  uint64_t seed = 0;
  bool async_late = true;  // a cp.async copies at its wait, else when issued
  int workers = 1;         // OS threads that run blocks
};

// ---- sanitizers: what they must be told ------------------------------------------------------------------------
#ifdef SIMT_TSAN
// The emulator's bookkeeping is not the kernel's: out of the race detector's sight while one of these lives.
struct Quiet {
  Quiet() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
  ~Quiet() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
};
inline void happens_before(void* tag) { __tsan_release(tag); }
inline void happens_after(void* tag) { __tsan_acquire(tag); }
#else
struct Quiet {
  ~Quiet() {}
};
inline void happens_before(void*) {}
inline void happens_after(void*) {}
#endif
#ifdef SIMT_ASAN
inline void poison(const void* from, const void* to) {
  ASAN_POISON_MEMORY_REGION(from, (const char*)to - (const char*)from);
}
inline void unpoison(const void* from, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(from, bytes); }
constexpr int kStripBytes = 64;  // after each piece of shared memory
#else
inline void poison(const void*, const void*) {}
inline void unpoison(const void*, size_t) {}
constexpr int kStripBytes = 0;
#endif

// ---- fibers ----------------------------------------------------------------------------------------------------
enum class State : uint8_t { ready, at_barrier, at_warp, done };
struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
};
struct Fiber {
  dim3 thread;
  unsigned flat = 0;
  State state = State::ready;
  const char* what = "";  // where it waits
  int line = 0;
  std::vector<Copy> open;  // cp.async copies not yet committed, and the committed groups
  std::deque<std::vector<Copy>> groups;
  unsigned char* stack = nullptr;
  void* stack_pointer = nullptr;
  void *tsan = nullptr, *asan = nullptr;
#ifdef SIMT_UCONTEXT
  ucontext_t context;
#endif
};
struct Warp {
  uint32_t arrived = 0, exited = 0;
  uint64_t value[32], result[32];
  uint32_t argument[32], mask[32];
  int operation[32];
};
struct Worker {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned live = 0, waiting = 0;
  int any = 0, all = 1, count = 0, barrier_result[3] = {}, barrier_line = 0;
  char barrier_tag = 0, launch_tag = 0;
  dim3 block, grid, block_index;
  size_t shared_bytes = 0;
  Options options;
  std::string error;
  void (*entry)(void*) = nullptr;
  void* entry_argument = nullptr;
  std::mt19937_64 random;
  std::vector<unsigned> order;
  void *stack_pointer = nullptr, *tsan = nullptr, *asan = nullptr;  // of the OS thread itself
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
#ifdef SIMT_UCONTEXT
  ucontext_t context;
#endif
  ~Worker() {
    for (Fiber& f : fibers) {
      if (f.stack) munmap(f.stack - 4096, kStackBytes + 4096);
#ifdef SIMT_TSAN
      if (f.tsan) __tsan_destroy_fiber(f.tsan);
#endif
    }
  }
};
inline thread_local Worker* worker = nullptr;
inline thread_local Fiber* current = nullptr;

#ifndef SIMT_UCONTEXT
extern "C" void simt_switch(void** save, void* to) asm("simt_switch_stack");
asm(R"(
.text
.weak simt_switch_stack
.type simt_switch_stack,@function
simt_switch_stack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size simt_switch_stack,.-simt_switch_stack
)");
#endif

inline void to_fiber(Worker& w, Fiber& f) {
  current = &f;
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(&w.asan, f.stack, kStackBytes);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(f.tsan, 1 /* orders nothing */);
#endif
#ifdef SIMT_UCONTEXT
  swapcontext(&w.context, &f.context);
#else
  simt_switch(&w.stack_pointer, f.stack_pointer);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(w.asan, nullptr, nullptr);
#endif
}
inline void to_worker() {
  Worker& w = *worker;
  Fiber& f = *current;
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(f.state == State::done ? nullptr : &f.asan, w.stack_bottom, w.stack_bytes);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(w.tsan, f.state != State::done);  // what a thread did comes before what follows the launch
#endif
#ifdef SIMT_UCONTEXT
  swapcontext(&f.context, &w.context);
#else
  simt_switch(&f.stack_pointer, w.stack_pointer);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(f.asan, nullptr, nullptr);
#endif
}
[[noreturn]] inline void fail(const std::string& text) {
  Quiet quiet;
  Worker& w = *worker;
  const dim3 b = w.block_index, t = current->thread;
  char place[128];
  snprintf(place, sizeof place, "block (%u,%u,%u) thread (%u,%u,%u): ", b.x, b.y, b.z, t.x, t.y, t.z);
  if (w.error.empty()) w.error = place + text;
  current->state = State::done;
  to_worker();
  abort();
}

}  // namespace simt
