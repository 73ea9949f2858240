// simt_cpu.h - run CUDA C++ kernels on the CPU, for tests. One block at a time per OS thread;
// the block's threads are fibers that run until they meet a barrier, a warp collective or the end.
//   schedule : forward | reverse | random(seed)  order in which runnable fibers run between barriers
//   async    : late | early                      when a cp.async copy really happens (late = at its wait)
// A kernel that is right gives the same bits under every schedule; one with a missing barrier does not.
// Build: g++ -std=c++17 -DSIMT_CPU  [-fsanitize=address,bounds,alignment]  [-fsanitize=thread]
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#elif defined(__SANITIZE_THREAD__)
extern "C" {  // sanitizer/tsan_interface.h; GCC ships the functions but not always the header
void* __tsan_create_fiber(unsigned); void __tsan_destroy_fiber(void*); void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void*, unsigned); void __tsan_acquire(void*); void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int); void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int); void AnnotateIgnoreWritesEnd(const char*, int);
}
#define SIMT_TSAN 1
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#define SIMT_UCONTEXT 1
#endif

// ---- language -------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ thread_local  // at block scope this means static; "extern __shared__" works too
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

struct dim3 { unsigned x, y, z; constexpr dim3(unsigned X = 1, unsigned Y = 1, unsigned Z = 1) : x(X), y(Y), z(Z) {} };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline double2 make_double2(double x, double y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

#ifndef SIMT_MAX_SMEM
#define SIMT_MAX_SMEM (227 * 1024)
#endif
namespace simt {
inline thread_local unsigned char dynamic_smem[SIMT_MAX_SMEM + 4096] __align__(128);   // the block's dynamic shared memory
#ifdef SIMT_TSAN   // the emulator's own bookkeeping is not the kernel's: keep it out of the race detector
struct Quiet {
  Quiet() { AnnotateIgnoreReadsBegin("", 0); AnnotateIgnoreWritesBegin("", 0); }
  ~Quiet() { AnnotateIgnoreWritesEnd("", 0); AnnotateIgnoreReadsEnd("", 0); }
};
#else
struct Quiet { ~Quiet() {} };
#endif
enum class Schedule { forward, reverse, random };
struct Options {
  Schedule schedule = Schedule::forward;
  uint64_t seed = 0;
  bool async_late = true;
  int workers = 1;        // OS threads that run blocks
  bool strict = true;     // a thread that returns while others wait at __syncthreads is an error
  static Options from_env() {
    Options o; const char* s;
    if ((s = getenv("SIMT_SCHEDULE"))) o.schedule = !strcmp(s, "reverse") ? Schedule::reverse : !strcmp(s, "random") ? Schedule::random : Schedule::forward;
    if ((s = getenv("SIMT_SEED"))) o.seed = strtoull(s, nullptr, 10);
    if ((s = getenv("SIMT_ASYNC"))) o.async_late = strcmp(s, "early") != 0;
    if ((s = getenv("SIMT_WORKERS"))) o.workers = atoi(s);
    return o;
  }
};
struct Stats { uint64_t resumes = 0, blocks = 0, threads = 0; };
inline std::atomic<uint64_t> total_resumes{0};

enum class State : uint8_t { ready, at_barrier, at_warp, done };
struct Copy { void* dst; const void* src; unsigned bytes; };
struct Fiber {
  dim3 tid; unsigned flat = 0; State state = State::ready;
  const char* where_file = ""; int where_line = 0; const char* what = "";
  void* sp = nullptr; unsigned char* stack = nullptr;
  std::vector<Copy> open; std::deque<std::vector<Copy>> groups;   // cp.async in flight
  void* tsan = nullptr; void* fake = nullptr;
#ifdef SIMT_UCONTEXT
  ucontext_t uc;
#endif
};
struct Warp {
  uint32_t arrived = 0, exited = 0;
  uint64_t val[32], res[32]; uint32_t arg[32], mask[32]; int op[32];
};
struct Worker {
  static constexpr size_t kStack = 64 * 1024;
  std::vector<Fiber> fib; std::vector<Warp> warp;
  unsigned n = 0, live = 0, waiting = 0; int bar_or = 0, bar_and = 1, bar_count = 0, bar_res[3] = {};
  dim3 block, grid, bidx; Options opt; std::string error;
  void (*entry)(void*) = nullptr; void* entry_ctx = nullptr;
  void* host_sp = nullptr; void* tsan_host = nullptr; void* fake_host = nullptr;
  const void* host_bottom = nullptr; size_t host_size = 0; char bar_tag = 0;
  std::mt19937_64 rng; std::vector<unsigned> order; uint64_t resumes = 0;
#ifdef SIMT_UCONTEXT
  ucontext_t host_uc;
#endif
  ~Worker() {
    for (auto& f : fib) {
      if (f.stack) munmap(f.stack - 4096, kStack + 4096);
#ifdef SIMT_TSAN
      if (f.tsan) __tsan_destroy_fiber(f.tsan);
#endif
    }
  }
};
inline thread_local Worker* wk = nullptr;
inline thread_local Fiber* cur = nullptr;

#ifndef SIMT_UCONTEXT
extern "C" void simt_switch_(void** save, void* to) asm("simt_switch_local");
asm(R"(
.text
.type simt_switch_local,@function
simt_switch_local:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size simt_switch_local,.-simt_switch_local
)");
#endif
inline void to_fiber(Worker& w, Fiber& f) {
  cur = &f; ++w.resumes;
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(&w.fake_host, f.stack, Worker::kStack);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(f.tsan, 1 /* no happens-before: only barriers order fibers */);
#endif
#ifdef SIMT_UCONTEXT
  swapcontext(&w.host_uc, &f.uc);
#else
  simt_switch_(&w.host_sp, f.sp);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(w.fake_host, nullptr, nullptr);
#endif
}
inline void to_host() {
  Worker& w = *wk; Fiber& f = *cur;
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(f.state == State::done ? nullptr : &f.fake, w.host_bottom, w.host_size);
#elif defined(SIMT_TSAN)
  __tsan_switch_to_fiber(w.tsan_host, 1);
#endif
#ifdef SIMT_UCONTEXT
  swapcontext(&f.uc, &w.host_uc);
#else
  simt_switch_(&f.sp, w.host_sp);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(f.fake, nullptr, nullptr);
#endif
}
[[noreturn]] inline void fail(const std::string& msg) {
  Worker& w = *wk; Fiber& f = *cur;
  Quiet quiet;
  if (w.error.empty()) {
    char b[128]; snprintf(b, sizeof b, "block (%u,%u,%u) thread (%u,%u,%u): ", w.bidx.x, w.bidx.y, w.bidx.z, f.tid.x, f.tid.y, f.tid.z);
    w.error = b + msg;
  }
  f.state = State::done; to_host(); abort();
}
inline void release_barrier(Worker& w) {
  w.bar_res[0] = w.bar_or; w.bar_res[1] = w.bar_and; w.bar_res[2] = w.bar_count;
  w.bar_or = 0; w.bar_and = 1; w.bar_count = 0; w.waiting = 0;
  for (unsigned i = 0; i < w.n; ++i) if (w.fib[i].state == State::at_barrier) w.fib[i].state = State::ready;
}
inline int barrier(const char* file, int line, int pred, int kind) {
  Quiet quiet;
  Worker& w = *wk; Fiber& f = *cur;
  if (w.opt.strict && w.live != w.n) fail("__syncthreads after another thread of the block returned (" + std::string(file) + ":" + std::to_string(line) + ")");
  f.what = "__syncthreads"; f.where_file = file; f.where_line = line;
  if (w.waiting) {
    for (unsigned i = 0; i < w.n; ++i) if (w.fib[i].state == State::at_barrier) {
      if (w.fib[i].where_line != line) fail("divergent __syncthreads: line " + std::to_string(line) + " here, line " + std::to_string(w.fib[i].where_line) + " in another thread");
      break;
    }
  }
#ifdef SIMT_TSAN
  __tsan_release(&w.bar_tag);
#endif
  w.bar_or |= pred != 0; w.bar_and &= pred != 0; w.bar_count += pred != 0;
  ++w.waiting; f.state = State::at_barrier;
  if (w.waiting == w.live) release_barrier(w);
  to_host();
#ifdef SIMT_TSAN
  __tsan_acquire(&w.bar_tag);
#endif
  return w.bar_res[kind];
}
// every lane of `mask` meets here; the last one to come computes every lane's result
using WarpFn = uint64_t (*)(const Warp&, uint32_t mask, int lane);
inline uint64_t collective(int op, const char* what, uint32_t mask, uint64_t v, uint32_t arg, WarpFn fn, int line) {
  Quiet quiet;
  Worker& w = *wk; Fiber& f = *cur; unsigned wi = f.flat / 32, lane = f.flat % 32; Warp& q = w.warp[wi];
  unsigned lanes = std::min(32u, w.n - wi * 32); uint32_t exist = lanes == 32 ? ~0u : (1u << lanes) - 1;
  if (!(mask >> lane & 1)) fail(std::string(what) + ": the calling lane is not in its own mask");
  uint32_t need = mask & exist;
  if (need & q.exited) fail(std::string(what) + " waits for a lane that has returned");
  f.what = what; f.where_line = line;
  q.val[lane] = v; q.arg[lane] = arg; q.mask[lane] = mask; q.op[lane] = op; q.arrived |= 1u << lane;
#ifdef SIMT_TSAN
  __tsan_release(&q);
#endif
  if ((q.arrived & need) == need) {
    for (unsigned l = 0; l < 32; ++l) if (need >> l & 1) {
      if (q.op[l] != op || q.mask[l] != mask) fail(std::string(what) + ": lanes of one mask are at different warp operations");
      q.res[l] = fn(q, need, (int)l);
    }
    for (unsigned l = 0; l < 32; ++l) if (need >> l & 1) { Fiber& g = w.fib[wi * 32 + l]; if (g.state == State::at_warp) g.state = State::ready; }
    q.arrived &= ~need;
    if (w.opt.schedule != Schedule::forward) to_host();   // the last lane to come need not go on first
  } else { f.state = State::at_warp; to_host(); }
#ifdef SIMT_TSAN
  __tsan_acquire(&q);
#endif
  return q.res[lane];
}
template <class T> uint64_t bits(T v) { static_assert(sizeof(T) <= 8); uint64_t u = 0; memcpy(&u, &v, sizeof v); return u; }
template <class T> T unbits(uint64_t u) { T v; memcpy(&v, &u, sizeof v); return v; }
inline uint64_t pick(const Warp& q, uint32_t mask, int lane) {
  uint32_t s = q.arg[lane]; if (!(mask >> s & 1)) return 0xFFFFFFFFFFFFFFFFull;  // undefined on a GPU: make it loud
  return q.val[s];
}
template <class T> T shfl(uint32_t mask, T v, int src, int line) { return unbits<T>(collective(1, "__shfl_sync", mask, bits(v), (uint32_t)src & 31, pick, line)); }
inline int lane_id() { return (int)(cur->flat % 32); }
template <class T> T shfl_idx(uint32_t m, T v, int s, int w, int line) { int l = lane_id(); return shfl(m, v, (l & ~(w - 1)) | (s & (w - 1)), line); }
template <class T> T shfl_down(uint32_t m, T v, unsigned d, int w, int line) { int l = lane_id(), s = l + (int)d; return shfl(m, v, (l & (w - 1)) + (int)d >= w ? l : s, line); }
template <class T> T shfl_up(uint32_t m, T v, unsigned d, int w, int line) { int l = lane_id(), s = l - (int)d; return shfl(m, v, (l & (w - 1)) < (int)d ? l : s, line); }
template <class T> T shfl_xor(uint32_t m, T v, int x, int w, int line) { int l = lane_id(), s = l ^ x; return shfl(m, v, s >= (l & ~(w - 1)) + w ? l : s, line); }
inline uint64_t f_ballot(const Warp& q, uint32_t m, int) { uint32_t r = 0; for (int i = 0; i < 32; ++i) if (m >> i & 1 && q.val[i]) r |= 1u << i; return r; }
inline uint64_t f_add(const Warp& q, uint32_t m, int) { uint32_t r = 0; for (int i = 0; i < 32; ++i) if (m >> i & 1) r += (uint32_t)q.val[i]; return r; }
inline uint64_t f_max(const Warp& q, uint32_t m, int) { uint32_t r = 0; for (int i = 0; i < 32; ++i) if (m >> i & 1) r = std::max(r, (uint32_t)q.val[i]); return r; }
inline uint64_t f_match(const Warp& q, uint32_t m, int lane) { uint32_t r = 0; for (int i = 0; i < 32; ++i) if (m >> i & 1 && q.val[i] == q.val[lane]) r |= 1u << i; return r; }
inline uint64_t f_none(const Warp&, uint32_t, int) { return 0; }

// ---- cp.async --------------------------------------------------------------------------------
inline void async_copy(void* dst, const void* src, unsigned bytes) {
  if ((uintptr_t)dst % bytes || (uintptr_t)src % bytes) fail("cp.async of " + std::to_string(bytes) + " bytes: misaligned address");
  if (!wk->opt.async_late) { memcpy(dst, src, bytes); return; }
  Quiet quiet;
  cur->open.push_back({dst, src, bytes});
}
inline void async_commit() { Quiet quiet; cur->groups.push_back(std::move(cur->open)); cur->open.clear(); }
inline void async_wait(unsigned keep) {
  for (;;) {
    std::vector<Copy> g;
    { Quiet quiet; if (cur->groups.size() <= keep) return; g = std::move(cur->groups.front()); cur->groups.pop_front(); }
    for (auto& c : g) memcpy(c.dst, c.src, c.bytes);
  }
}
// ---- launch ----------------------------------------------------------------------------------
inline void fiber_main() {
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &wk->host_bottom, &wk->host_size);
#endif
  Worker& w = *wk; Fiber& f = *cur;
#ifdef SIMT_TSAN
  __tsan_acquire(&w.host_sp);            // the launch happens before every thread
#endif
  w.entry(w.entry_ctx);
  { Quiet quiet;
  for (auto& g : f.groups) if (!g.empty()) f.open.push_back(g[0]);
  if (!f.open.empty()) fail("returned with cp.async copies never waited for");
  f.state = State::done; --w.live; w.warp[f.flat / 32].exited |= 1u << f.flat % 32;
  if (w.waiting && w.opt.strict) { f.state = State::ready; fail("returned while other threads wait at __syncthreads"); }
  if (w.waiting && w.waiting == w.live) release_barrier(w); }
#ifdef SIMT_TSAN
  __tsan_release(&w.bar_tag);
#endif
  to_host(); abort();
}
inline void start(Fiber& f) {
  if (!f.stack) {
    auto* p = (unsigned char*)mmap(nullptr, Worker::kStack + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mprotect(p, 4096, PROT_NONE); f.stack = p + 4096;
  }
#ifdef SIMT_ASAN
  ASAN_UNPOISON_MEMORY_REGION(f.stack, Worker::kStack);
#elif defined(SIMT_TSAN)
  if (!f.tsan) f.tsan = __tsan_create_fiber(0);
#endif
#ifdef SIMT_UCONTEXT
  getcontext(&f.uc); f.uc.uc_stack.ss_sp = f.stack; f.uc.uc_stack.ss_size = Worker::kStack; f.uc.uc_link = nullptr;
  makecontext(&f.uc, (void (*)())fiber_main, 0);
#else
  void** sp = (void**)(f.stack + Worker::kStack - 64); memset(sp, 0, 64); sp[6] = (void*)&fiber_main; f.sp = sp;
#endif
  f.state = State::ready; f.open.clear(); f.groups.clear(); f.what = "";
}
inline void run_block(Worker& w, dim3 b, size_t smem) {
  Quiet quiet;
  w.bidx = b; w.live = w.n; w.waiting = 0;
  for (auto& q : w.warp) q.arrived = q.exited = 0;
#ifdef SIMT_ASAN
  ASAN_UNPOISON_MEMORY_REGION(dynamic_smem, sizeof dynamic_smem);
#endif
  memset(dynamic_smem, 0xFF, smem);                                    // NaN in fp32 and bf16, -1 in int
#ifdef SIMT_ASAN
  ASAN_POISON_MEMORY_REGION(dynamic_smem + smem, sizeof dynamic_smem - smem);
#elif defined(SIMT_TSAN)
  __tsan_release(&w.host_sp);
#endif
  for (unsigned i = 0; i < w.n; ++i) start(w.fib[i]);
  while (w.live && w.error.empty()) {
    w.order.clear();
    for (unsigned i = 0; i < w.n; ++i) if (w.fib[i].state == State::ready) w.order.push_back(i);
    if (w.order.empty()) {
      for (auto& f : w.fib) if (f.state != State::done) { cur = &f; w.error = "deadlock: thread " + std::to_string(f.flat) + " waits at " + f.what + " line " + std::to_string(f.where_line); break; }
      break;
    }
    if (w.opt.schedule == Schedule::reverse) std::reverse(w.order.begin(), w.order.end());
    else if (w.opt.schedule == Schedule::random) std::shuffle(w.order.begin(), w.order.end(), w.rng);
    for (unsigned i : w.order) { if (w.fib[i].state == State::ready) to_fiber(w, w.fib[i]); if (!w.error.empty()) break; }
  }
#ifdef SIMT_TSAN
  __tsan_acquire(&w.bar_tag);
#endif
}
template <class... P, class... A> Stats launch(const Options& opt, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A&&... a) {
  unsigned n = block.x * block.y * block.z;
  if (n == 0 || n > 1024 || block.z > 64) throw std::runtime_error("block of " + std::to_string(n) + " threads");
  if (smem > SIMT_MAX_SMEM) throw std::runtime_error("dynamic shared memory " + std::to_string(smem) + " > " + std::to_string(SIMT_MAX_SMEM));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) throw std::runtime_error("bad grid");
  std::tuple<P...> args(std::forward<A>(a)...);
  auto body = [&] { std::apply(kernel, args); };
  using Body = decltype(body);
  uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z; std::atomic<uint64_t> next{0}; std::mutex mu; std::string err; Stats st;
  auto work = [&](int id) {
    Quiet quiet; Worker w; w.n = n; w.block = block; w.grid = grid; w.opt = opt; w.rng.seed(opt.seed * 7919 + id);
    w.fib.resize(n); w.warp.resize((n + 31) / 32); w.entry = [](void* c) { (*(Body*)c)(); }; w.entry_ctx = &body;
    for (unsigned i = 0; i < n; ++i) { w.fib[i].flat = i; w.fib[i].tid = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y)); }
#ifdef SIMT_TSAN
    w.tsan_host = __tsan_get_current_fiber();
#endif
    Worker* old = wk; wk = &w;
    for (uint64_t k; (k = next++) < blocks && w.error.empty();) {
      uint64_t b = opt.schedule == Schedule::reverse ? blocks - 1 - k : k;      // blocks too must not lean on an order
      if (opt.schedule == Schedule::random && blocks > 1) b = (k * 2654435761ull + opt.seed) % blocks, b = std::gcd(2654435761ull, blocks) == 1 ? b : k;
      run_block(w, dim3(b % grid.x, b / grid.x % grid.y, b / ((uint64_t)grid.x * grid.y)), smem);
    }
    wk = old; cur = nullptr;
#ifdef SIMT_ASAN
    ASAN_UNPOISON_MEMORY_REGION(dynamic_smem, sizeof dynamic_smem);
#endif
    std::lock_guard<std::mutex> g(mu); st.resumes += w.resumes; if (err.empty() && !w.error.empty()) err = w.error;
  };
  if (opt.workers <= 1) work(0);
  else { std::vector<std::thread> t; for (int i = 0; i < opt.workers; ++i) t.emplace_back(work, i); for (auto& x : t) x.join(); }
  total_resumes += st.resumes; st.blocks = blocks; st.threads = blocks * n;
  if (!err.empty()) throw std::runtime_error(err);
  return st;
}
// atomics: relaxed, as on the GPU
template <class T, class F> T rmw(T* p, F f) {
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>; U o, d; o = __atomic_load_n((U*)p, __ATOMIC_RELAXED);
  do { T v; memcpy(&v, &o, sizeof v); v = f(v); memcpy(&d, &v, sizeof v); } while (!__atomic_compare_exchange_n((U*)p, &o, d, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  T v; memcpy(&v, &o, sizeof v); return v;
}
}  // namespace simt

#define threadIdx (::simt::cur->tid)
#define blockIdx (::simt::wk->bidx)
#define blockDim (::simt::wk->block)
#define gridDim (::simt::wk->grid)
static constexpr int warpSize = 32;
#define SIMT_HERE const char* file = __builtin_FILE(), int line = __builtin_LINE()   // the caller's
inline void __syncthreads(SIMT_HERE) { simt::barrier(file, line, 0, 0); }
inline int __syncthreads_or(int p, SIMT_HERE) { return simt::barrier(file, line, p, 0); }
inline int __syncthreads_and(int p, SIMT_HERE) { return simt::barrier(file, line, p, 1); }
inline int __syncthreads_count(int p, SIMT_HERE) { return simt::barrier(file, line, p, 2); }
inline void __syncwarp(uint32_t m = ~0u, int line = __builtin_LINE()) { simt::collective(2, "__syncwarp", m, 0, 0, simt::f_none, line); }
template <class T> T __shfl_sync(uint32_t m, T v, int s, int w = 32, int line = __builtin_LINE()) { return simt::shfl_idx(m, v, s, w, line); }
template <class T> T __shfl_down_sync(uint32_t m, T v, unsigned d, int w = 32, int line = __builtin_LINE()) { return simt::shfl_down(m, v, d, w, line); }
template <class T> T __shfl_up_sync(uint32_t m, T v, unsigned d, int w = 32, int line = __builtin_LINE()) { return simt::shfl_up(m, v, d, w, line); }
template <class T> T __shfl_xor_sync(uint32_t m, T v, int x, int w = 32, int line = __builtin_LINE()) { return simt::shfl_xor(m, v, x, w, line); }
inline uint32_t __ballot_sync(uint32_t m, int p, int line = __builtin_LINE()) { return (uint32_t)simt::collective(3, "__ballot_sync", m, p != 0, 0, simt::f_ballot, line); }
inline int __any_sync(uint32_t m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(uint32_t m, int p) { return __ballot_sync(m, !p) == 0; }
inline uint32_t __reduce_add_sync(uint32_t m, uint32_t v) { return (uint32_t)simt::collective(4, "__reduce_add_sync", m, v, 0, simt::f_add, 0); }
inline uint32_t __reduce_max_sync(uint32_t m, uint32_t v) { return (uint32_t)simt::collective(5, "__reduce_max_sync", m, v, 0, simt::f_max, 0); }
template <class T> uint32_t __match_any_sync(uint32_t m, T v) { return (uint32_t)simt::collective(6, "__match_any_sync", m, simt::bits(v), 0, simt::f_match, 0); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T, class V> T atomicAdd(T* p, V v) { return simt::rmw(p, [=](T x) { return (T)(x + (T)v); }); }
template <class T, class V> T atomicMax(T* p, V v) { return simt::rmw(p, [=](T x) { return x > (T)v ? x : (T)v; }); }
template <class T, class V> T atomicMin(T* p, V v) { return simt::rmw(p, [=](T x) { return x < (T)v ? x : (T)v; }); }
template <class T, class V> T atomicOr(T* p, V v) { return simt::rmw(p, [=](T x) { return (T)(x | (T)v); }); }
template <class T, class V> T atomicExch(T* p, V v) { return simt::rmw(p, [=](T) { return (T)v; }); }
template <class T> T atomicCAS(T* p, T c, T v) { return simt::rmw(p, [=](T x) { return x == c ? v : x; }); }

// ---- arithmetic ------------------------------------------------------------------------------
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { return simt::unbits<float>((uint32_t)x); }
inline int __float_as_int(float x) { return (int)simt::bits(x); }
inline float __uint_as_float(unsigned x) { return simt::unbits<float>(x); }
inline unsigned __float_as_uint(float x) { return (unsigned)simt::bits(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
using std::max; using std::min; using std::fma;
namespace simt {
// What cvt.rn gives: round to nearest even, NaN to 0x7fff.
inline unsigned short bf16_bits(float x) {
  const uint32_t u = (uint32_t)bits(x);
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline unsigned short fp16_bits(float x) {
  if (x != x) return 0x7fff;
  const _Float16 half = (_Float16)x;
  unsigned short b; memcpy(&b, &half, 2); return b;
}
inline float fp16_value(unsigned short b) { _Float16 half; memcpy(&half, &b, 2); return (float)half; }
#ifdef SIMT_ASAN
inline void poison(const void* from, const void* to) { ASAN_POISON_MEMORY_REGION(from, (const char*)to - (const char*)from); }
#endif
}  // namespace simt
