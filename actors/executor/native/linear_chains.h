// Included between CUE_TARGET_… and CUE_TARGET_END: the loop over units of the AVX-512 kernels that sum in float32.

// tile.y = the sum over all units of weights * x, for R rows. `Unit::accumulate` adds one unit to the sums, and
// `Unit::prefetch` fetches weights that are needed later.
//
// An FMA has a latency of 4 cycles and vdpbf16ps of 6. With few rows, units are distributed over several chains of
// sums, so that at least 8 sums are in flight.
template <class Unit, int R>
void sum_units(const TileArgs& tile, const uint8_t* weights) {
    constexpr int kChains = R == 1 ? 4 : R <= 3 ? 2 : 1;
    __m512 sums[kChains][R][2];
#pragma GCC unroll 4
    for (int u = 0; u < kChains; ++u)
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_ps();
    const uint8_t* x = tile.x;
    const uint8_t* prefetch_at = tile.prefetch_at;
    const int64_t unit_stride = tile.unit_stride, prefetch_step = tile.prefetch_step;
    const int64_t unrolled_units = tile.units - tile.units % kChains;
    for (int64_t unit = 0; unit < unrolled_units; unit += kChains) {
#pragma GCC unroll 4
        for (int u = 0; u < kChains; ++u) {
            Unit::template prefetch<R>(prefetch_at);
            Unit::template accumulate<R>(x, weights, sums[u]);
            x += unit_stride;
            weights += kUnitBytes;
            prefetch_at += prefetch_step;
        }
    }
    if (kChains > 1)
        for (int64_t unit = unrolled_units; unit < tile.units; ++unit, x += unit_stride, weights += kUnitBytes)
            Unit::template accumulate<R>(x, weights, sums[0]);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int u = 1; u < kChains; ++u)
            for (int p = 0; p < 2; ++p) sums[0][r][p] = _mm512_add_ps(sums[0][r][p], sums[u][r][p]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride, sums[0][r][0]);
        _mm512_storeu_ps(tile.y + r * tile.y_stride + 16, sums[0][r][1]);
    }
}
