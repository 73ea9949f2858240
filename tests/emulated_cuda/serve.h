// The main program round emulated kernels: reads arrays and launches from one file, runs them in order, writes the
// arrays to another. `run.py` writes and reads these files; their layout is the order of the reads below.
#pragma once
#include <fstream>
#include <iostream>
#include "simt_cpu.h"

namespace simt {

// A device array: allocated to the byte, so that AddressSanitizer sees every step outside, and aligned as cudaMalloc's.
struct Array {
  char* data = nullptr;
  uint64_t bytes = 0;
};

struct Argument {
  enum Kind : uint32_t { null, array, scalar } kind;
  uint32_t bytes;
  uint64_t value;  // number of the array, or the scalar's bytes
};

struct Launch {
  uint32_t kernel;
  dim3 grid, block;
  uint64_t shared_bytes;
  Options options;
  std::vector<Argument> arguments;
};

inline std::vector<Array> arrays;

template <class T>
T read(std::istream& in) {
  T value;
  in.read((char*)&value, sizeof value);
  if (!in) throw std::runtime_error("the request is cut short");
  return value;
}

inline Array read_array(std::istream& in) {
  Array a;
  a.bytes = read<uint64_t>(in);
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, std::max<uint64_t>(a.bytes, 1))) throw std::bad_alloc();
  a.data = (char*)memory;
  in.read(a.data, (std::streamsize)a.bytes);
  return a;
}

inline dim3 read_dim3(std::istream& in) {
  const unsigned x = read<uint32_t>(in), y = read<uint32_t>(in), z = read<uint32_t>(in);
  return dim3(x, y, z);
}

inline Launch read_launch(std::istream& in) {
  Launch l;
  l.kernel = read<uint32_t>(in);
  l.grid = read_dim3(in);
  l.block = read_dim3(in);
  l.shared_bytes = read<uint64_t>(in);
  l.options.schedule = (Schedule)read<uint32_t>(in);
  l.options.seed = read<uint64_t>(in);
  l.options.async_late = read<uint32_t>(in) != 0;
  l.options.workers = (int)read<uint32_t>(in);
  l.arguments.resize(read<uint32_t>(in));
  for (Argument& a : l.arguments) a = read<Argument>(in);
  return l;
}

// The value of one parameter, checked against the parameter's own type.
template <class P>
P parameter(const Argument& a, size_t number) {
  const std::string place = "argument " + std::to_string(number);
  if constexpr (std::is_pointer_v<P>) {
    if (a.kind == Argument::scalar) throw std::runtime_error(place + " is a scalar, the kernel takes a pointer");
    return a.kind == Argument::null ? nullptr : (P)arrays.at(a.value).data;
  } else {
    if (a.kind != Argument::scalar || a.bytes != sizeof(P))
      throw std::runtime_error(place + " must be a scalar of " + std::to_string(sizeof(P)) + " bytes");
    return unbits<P>(a.value);
  }
}

template <class... P, size_t... I>
void launch_with(const Launch& l, void (*kernel)(P...), std::index_sequence<I...>) {
  if (l.arguments.size() != sizeof...(P))
    throw std::runtime_error("the kernel takes " + std::to_string(sizeof...(P)) + " arguments, got " +
                             std::to_string(l.arguments.size()));
  launch(l.options, kernel, l.grid, l.block, l.shared_bytes, parameter<P>(l.arguments[I], I)...);
}

template <class... P>
void launch_one(const Launch& l, void (*kernel)(P...)) {
  launch_with(l, kernel, std::index_sequence_for<P...>());
}

template <class... Kernels>
int serve(char** argv, Kernels... kernels) {
  try {
    std::ifstream in(argv[1], std::ios::binary);
    arrays.resize(read<uint32_t>(in));
    for (Array& a : arrays) a = read_array(in);
    for (uint32_t left = read<uint32_t>(in); left > 0; --left) {
      const Launch l = read_launch(in);
      uint32_t number = 0;
      ((number++ == l.kernel ? launch_one(l, kernels) : void()), ...);
    }
    std::ofstream out(argv[2], std::ios::binary);
    for (Array& a : arrays) {
      out.write(a.data, (std::streamsize)a.bytes);
      free(a.data);
    }
    return out ? 0 : 3;
  } catch (const std::exception& e) {
    std::cerr << e.what() << std::endl;
    return 2;
  }
}

}  // namespace simt
