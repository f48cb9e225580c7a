// Tiles of a processor (AMX): whether they may be used, their shapes, and how they are loaded and stored.
//
// Torch has tiles of its own, of shapes that it remembers: they are found as they were.  GCC 12 drops the stores that
// `_tile_loadconfig` should read, so instructions are written out.  Tests give the name of a header that computes tiles in
// C++ (SPECINFER_EMULATED_TILES), so that what multiplies in tiles runs on other processors as well.

#pragma once

#include <cstdint>

#if !defined(SPECINFER_EMULATED_TILES) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#define SPECINFER_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define SPECINFER_LOAD_TILE(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t)(stride)), "i"(tile) : "memory")
#define SPECINFER_STORE_TILE(tile, to, stride) \
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)), "i"(tile) : "memory")
#define SPECINFER_ZERO_TILE(tile) asm volatile("tilezero %%tmm%c0" ::"i"(tile))
#define SPECINFER_ADD_PRODUCTS(operation, weights, states, sums) \
    asm volatile(operation " %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(weights), "i"(states), "i"(sums))
#endif

namespace specinfer {

// Bytes of a row, and rows, of each of eight tiles.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

#ifdef SPECINFER_TILES
// Whether the system lets this process use tiles.
inline bool tiles_are_allowed() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

// While it lives, this thread has tiles of some shapes, if it wants any.
class InTiles {
    TileShapes before;
    const bool wanted;

  public:
    InTiles(bool wanted, const TileShapes& shapes) : wanted(wanted) {
        if (!wanted) return;
        asm volatile("sttilecfg %0" : "=m"(before)::"memory");
        reshape(shapes);
    }
    ~InTiles() {
        if (wanted && before.palette)
            reshape(before);
        else if (wanted)
            asm volatile("tilerelease" ::: "memory");
    }
    void reshape(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
};
#elif !defined(SPECINFER_EMULATED_TILES)
inline bool tiles_are_allowed() { return false; }

struct InTiles {
    InTiles(bool, const TileShapes&) {}
    void reshape(const TileShapes&) {}
};
#endif

}  // namespace specinfer

#ifdef SPECINFER_EMULATED_TILES
#define SPECINFER_TILES
#include SPECINFER_EMULATED_TILES
#endif
