// How fast rows can be moved at all: the same rows in the same order as the forward, in place, and no arithmetic
// of the rule between them. Per lane and token: W rows are read and written back, R rows are read, each prefetched
// four rows ahead.   bytes = 4 D (2 W + R)
//
// Axis letters: L lanes, T tokens, N slots, D width, W writes, R reads. Arrays are C-contiguous:
// table [L, N, D] float32, write_slots [L, T, W] int32, read_slots [L, T, R] int32, sink [threads, 16] float32.
// Columns are cut into `tiles` per lane (D / tiles a multiple of 8), as a run with fewer lanes than threads needs.
#include <cstdint>
#include <omp.h>

typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));

static inline void prefetch(const float *row, long width) {
    for (long c = 0; c < width; c += 16) __builtin_prefetch(row + c, 1, 3);
}

extern "C" void move_rows(float *table, const int32_t *write_slots, const int32_t *read_slots, float *sink, float one,
                          long L, long T, long N, long D, long W, long R, long tiles, int threads) {
    const long width = D / tiles;
#pragma omp parallel num_threads(threads)
    {
        vec sum[4] = {};
#pragma omp for schedule(static)
        for (long job = 0; job < L * tiles; job++) {
            float *lane = table + (job / tiles) * N * D + (job % tiles) * width;
            for (long t = 0; t < T; t++) {
                const int32_t *write = write_slots + ((job / tiles) * T + t) * W;
                const int32_t *read = read_slots + ((job / tiles) * T + t) * R;
                for (long w = 0; w < W; w++) {
                    prefetch(lane + (long)(w + 4 < W ? write[w + 4] : read[(w + 4 - W) % R]) * D, width);
                    float *row = lane + (long)write[w] * D;
                    // times a 1 that the compiler does not know, so that load and store both stay
                    for (long c = 0; c < width; c += 8) *(vec *)(row + c) = *(vec *)(row + c) * one;
                }
                for (long r = 0; r < R; r++) {
                    prefetch(lane + (long)read[r + 4 < R ? r + 4 : r] * D, width);
                    const float *row = lane + (long)read[r] * D;
                    long c = 0;
                    for (; c + 32 <= width; c += 32)
                        for (int j = 0; j < 4; j++) sum[j] += *(const vec *)(row + c + 8 * j);
                    for (; c < width; c += 8) sum[0] += *(const vec *)(row + c);
                }
            }
        }
        vec total = sum[0] + sum[1] + sum[2] + sum[3];
        for (int j = 0; j < 8; j++) sink[16 * omp_get_thread_num() + j] = total[j];
    }
}
