// Runs the blocks of a CUDA kernel on the CPU: barriers, warp operations, asynchronous copies, launches. A block's
// threads are fibers on one OS thread; a fiber runs until it meets a barrier or a warp operation, or ends.
#pragma once
#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include "simt_fibers.h"

namespace simt {

// ---- barriers and warp operations ------------------------------------------------------------------------------
inline void release_barrier(Worker& w) {
  w.barrier_result[0] = w.any, w.barrier_result[1] = w.all, w.barrier_result[2] = w.count;
  w.any = 0, w.all = 1, w.count = 0, w.waiting = 0;
  for (Fiber& f : w.fibers)
    if (f.state == State::at_barrier) f.state = State::ready;
}
// Wait for the whole block; `result` says which of any, all, count of the predicates to return.
inline int barrier(int line, int predicate, int result) {
  Quiet quiet;
  Worker& w = *worker;
  Fiber& f = *current;
  if (w.live != w.fibers.size())
    fail("__syncthreads in line " + std::to_string(line) + " after another thread of the block returned");
  if (w.waiting && w.barrier_line != line)
    fail("divergent __syncthreads: line " + std::to_string(line) + " here, line " + std::to_string(w.barrier_line) +
         " in another thread");
  f.what = "__syncthreads", f.line = w.barrier_line = line;
  happens_before(&w.barrier_tag);
  w.any |= predicate != 0, w.all &= predicate != 0, w.count += predicate != 0;
  f.state = State::at_barrier;
  if (++w.waiting == w.live) release_barrier(w);
  to_worker();
  happens_after(&w.barrier_tag);
  return w.barrier_result[result];
}
// Every lane of `mask` meets here; the last to come computes the result of each.
using WarpFunction = uint64_t (*)(const Warp&, uint32_t lanes, int lane);
inline uint64_t collective(const char* what, int operation, uint32_t mask, uint64_t value, uint32_t argument,
                           WarpFunction result_of, int line) {
  Quiet quiet;
  Worker& w = *worker;
  Fiber& f = *current;
  const unsigned number = f.flat / 32, lane = f.flat % 32, size = (unsigned)w.fibers.size();
  const unsigned lanes = std::min(32u, size - number * 32);
  const uint32_t need = mask & (lanes == 32 ? ~0u : (1u << lanes) - 1);
  Warp& warp = w.warps[number];
  if (!(mask >> lane & 1)) fail(std::string(what) + ": the calling lane is not in its own mask");
  if (need & warp.exited) fail(std::string(what) + " waits for a lane that has returned");
  f.what = what, f.line = line;
  warp.value[lane] = value, warp.argument[lane] = argument, warp.mask[lane] = mask, warp.operation[lane] = operation;
  warp.arrived |= 1u << lane;
  happens_before(&warp);
  if ((warp.arrived & need) != need) {
    f.state = State::at_warp;
    to_worker();
  } else {
    for (int l = 0; l < 32; ++l) {
      if (!(need >> l & 1)) continue;
      if (warp.operation[l] != operation || warp.mask[l] != mask)
        fail(std::string(what) + ": lanes of one mask are at different warp operations");
      warp.result[l] = result_of(warp, need, l);
      Fiber& other = w.fibers[number * 32 + l];
      if (other.state == State::at_warp) other.state = State::ready;
    }
    warp.arrived &= ~need;
    if (w.options.schedule != Schedule::forward) to_worker();  // the last to come need not go on first
  }
  happens_after(&warp);
  return warp.result[lane];
}

// ---- cp.async --------------------------------------------------------------------------------------------------
inline void async_copy(void* to, const void* from, unsigned bytes) {
  if ((uintptr_t)to % bytes || (uintptr_t)from % bytes)
    fail("cp.async of " + std::to_string(bytes) + " bytes: misaligned address");
  if (!worker->options.async_late) {
    memcpy(to, from, bytes);
    return;
  }
  Quiet quiet;
  current->open.push_back({to, from, bytes});
}
inline void async_commit() {
  Quiet quiet;
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}
inline void async_wait(unsigned still_open) {
  for (;;) {
    std::vector<Copy> group;
    {
      Quiet quiet;
      if (current->groups.size() <= still_open) return;
      group = std::move(current->groups.front());
      current->groups.pop_front();
    }
    for (const Copy& c : group) memcpy(c.to, c.from, c.bytes);  // as accesses of the kernel
  }
}

// ---- dynamic shared memory -------------------------------------------------------------------------------------
// A piece was cut, `strips` pieces before it: it must lie within what the launch asked for.
inline void check_piece(const void* begin, const void* end, const void* next, int strips) {
  Quiet quiet;
  const auto stop = dynamic_smem + worker->shared_bytes + strips * kStripBytes;
  if ((const unsigned char*)end > stop)
    fail("the pieces of shared memory take " + std::to_string((const unsigned char*)end - stop) +
         " bytes more than the launch gives");
  unpoison(begin, (const char*)end - (const char*)begin);
  poison(end, next);
}

// ---- blocks ----------------------------------------------------------------------------------------------------
inline void fiber_main() {
  Worker& w = *worker;
  Fiber& f = *current;
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &w.stack_bottom, &w.stack_bytes);
#endif
  happens_after(&w.launch_tag);
  w.entry(w.entry_argument);
  {
    Quiet quiet;
    bool copies = !f.open.empty();
    for (const auto& group : f.groups) copies |= !group.empty();
    if (copies) fail("returned with cp.async copies never waited for");
    if (w.waiting) fail("returned while other threads wait at __syncthreads");
    f.state = State::done;
    --w.live;
    w.warps[f.flat / 32].exited |= 1u << f.flat % 32;
  }
  to_worker();
  abort();
}
inline void start(Fiber& f) {
  if (!f.stack) {
    void* memory = mmap(nullptr, kStackBytes + 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, 4096, PROT_NONE);  // running over the stack ends the program
    f.stack = (unsigned char*)memory + 4096;
  }
  unpoison(f.stack, kStackBytes);
#ifdef SIMT_TSAN
  if (!f.tsan) f.tsan = __tsan_create_fiber(0);
#endif
#ifdef SIMT_UCONTEXT
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack;
  f.context.uc_stack.ss_size = kStackBytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, fiber_main, 0);
#else
  void** top = (void**)(f.stack + kStackBytes - 64);  // six registers to pop, then the address to return to
  memset(top, 0, 64);
  top[6] = (void*)&fiber_main;
  f.stack_pointer = top;
#endif
  f.state = State::ready;
  f.open.clear();
  f.groups.clear();
}
inline void report_deadlock(Worker& w) {
  for (const Fiber& f : w.fibers)
    if (f.state != State::done) {
      w.error = "deadlock: thread " + std::to_string(f.flat) + " waits at " + f.what + ":" + std::to_string(f.line);
      return;
    }
}
inline void run_block(Worker& w, dim3 index) {
  w.block_index = index;
  w.live = (unsigned)w.fibers.size();
  w.waiting = 0;
  for (Warp& warp : w.warps) warp.arrived = warp.exited = 0;
  unpoison(dynamic_smem, sizeof dynamic_smem);
  memset(dynamic_smem, 0xff, sizeof dynamic_smem);  // NaN as any float, -1 as an integer: what is not written shows
  poison(dynamic_smem + w.shared_bytes, dynamic_smem + sizeof dynamic_smem);
  happens_before(&w.launch_tag);
  for (Fiber& f : w.fibers) start(f);
  while (w.live && w.error.empty()) {
    w.order.clear();
    for (const Fiber& f : w.fibers)
      if (f.state == State::ready) w.order.push_back(f.flat);
    if (w.order.empty()) return report_deadlock(w);
    if (w.options.schedule == Schedule::reverse) std::reverse(w.order.begin(), w.order.end());
    if (w.options.schedule == Schedule::random) std::shuffle(w.order.begin(), w.order.end(), w.random);
    for (unsigned i : w.order)
      if (w.error.empty() && w.fibers[i].state == State::ready) to_fiber(w, w.fibers[i]);
  }
}
// Block numbers in the order in which they run: the result must not lean on it.
inline std::vector<uint64_t> block_order(uint64_t blocks, const Options& options) {
  std::vector<uint64_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(options.seed);
  if (options.schedule == Schedule::reverse) std::reverse(order.begin(), order.end());
  if (options.schedule == Schedule::random) std::shuffle(order.begin(), order.end(), random);
  return order;
}
// One OS thread: every workers-th block, so that no order between two workers' blocks is ever implied.
inline std::string work(int id, const Options& options, dim3 grid, dim3 block, size_t shared_bytes,
                        const std::vector<uint64_t>& order, void (*entry)(void*), void* argument) {
  Quiet quiet;
  Worker w;
  w.block = block, w.grid = grid, w.shared_bytes = shared_bytes, w.options = options;
  w.entry = entry, w.entry_argument = argument;
  w.random.seed(options.seed * 7919 + id);
  const unsigned threads = block.x * block.y * block.z;
  w.fibers.resize(threads);
  w.warps.resize((threads + 31) / 32);
  for (unsigned i = 0; i < threads; ++i) {
    w.fibers[i].flat = i;
    w.fibers[i].thread = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y));
  }
#ifdef SIMT_TSAN
  w.tsan = __tsan_get_current_fiber();
#endif
  worker = &w;
  for (size_t i = id; i < order.size() && w.error.empty(); i += options.workers) {
    const uint64_t b = order[i];
    run_block(w, dim3(b % grid.x, b / grid.x % grid.y, b / ((uint64_t)grid.x * grid.y)));
  }
  worker = nullptr, current = nullptr;
  unpoison(dynamic_smem, sizeof dynamic_smem);
  return w.error;
}
inline void check_launch(dim3 grid, dim3 block, size_t shared_bytes, int workers) {
  const uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64)
    throw std::runtime_error("a block of " + std::to_string(threads) + " threads");
  if (shared_bytes > kMaxSharedBytes)
    throw std::runtime_error(std::to_string(shared_bytes) + " bytes of shared memory");
  if (grid.x == 0 || grid.x > 0x7fffffff || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535)
    throw std::runtime_error("a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
                             std::to_string(grid.z) + " blocks");
  if (workers < 1) throw std::runtime_error("no worker");
}
// Run a kernel; throws with block, thread and reason if it breaks a rule.
template <class... P, class... A>
void launch(const Options& options, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A&&... inputs) {
  check_launch(grid, block, shared_bytes, options.workers);
  std::tuple<P...> values(std::forward<A>(inputs)...);
  auto body = [&] { std::apply(kernel, values); };
  auto entry = [](void* argument) { (*(decltype(body)*)argument)(); };
  const auto order = block_order((uint64_t)grid.x * grid.y * grid.z, options);
  std::vector<std::string> errors(options.workers);
  auto run = [&](int id) { errors[id] = work(id, options, grid, block, shared_bytes, order, entry, &body); };
  std::vector<std::thread> threads;
  for (int id = 1; id < options.workers; ++id) threads.emplace_back(run, id);
  run(0);
  for (std::thread& t : threads) t.join();
  for (const std::string& error : errors)
    if (!error.empty()) throw std::runtime_error(error);
}

}  // namespace simt
