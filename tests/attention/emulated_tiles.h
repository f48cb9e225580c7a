// Tiles of a processor (AMX), computed in C++: included by kernels/tiles.h where a test asks for it.

#include <cstdlib>
#include <cstring>

#define SPECINFER_LOAD_TILE(tile, from, stride) specinfer::load_tile(tile, from, stride)
#define SPECINFER_STORE_TILE(tile, to, stride) specinfer::store_tile(tile, to, stride)
#define SPECINFER_ZERO_TILE(tile) specinfer::zero_tile(tile)
#define SPECINFER_ADD_PRODUCTS(operation, weights, states, sums) \
    specinfer::add_products_of_tiles(operation, weights, states, sums)

namespace specinfer {

inline thread_local TileShapes shapes_of_tiles;
inline thread_local uint8_t tiles[8][16][64];

inline bool tiles_are_allowed() { return true; }

// Tiles of new shapes hold something else than zeros, which a product must not read.
struct InTiles {
    InTiles(bool wanted, const TileShapes& shapes) {
        if (wanted) reshape(shapes);
    }
    void reshape(const TileShapes& shapes) {
        shapes_of_tiles = shapes;
        memset(tiles, 0x55, sizeof tiles);
    }
};

inline void load_tile(int tile, const void* from, int64_t stride) {
    for (int row = 0; row < shapes_of_tiles.rows[tile]; row++)
        memcpy(tiles[tile][row], (const char*)from + row * stride, shapes_of_tiles.bytes[tile]);
}

inline void store_tile(int tile, void* to, int64_t stride) {
    for (int row = 0; row < shapes_of_tiles.rows[tile]; row++)
        memcpy((char*)to + row * stride, tiles[tile][row], shapes_of_tiles.bytes[tile]);
}

inline void zero_tile(int tile) { memset(tiles[tile], 0, sizeof tiles[tile]); }

// tdpbsud, tdpbssd: bytes of states, with signs, times those of weights, without or with: four products a sum.
inline void add_products_of_tiles(const char* operation, int weights, int states, int sums) {
    const TileShapes& shapes = shapes_of_tiles;
    const bool has_signs = !strcmp(operation, "tdpbssd");
    const bool fit = shapes.rows[states] == shapes.rows[sums] && shapes.bytes[states] == 4 * shapes.rows[weights] &&
                     shapes.bytes[weights] == shapes.bytes[sums];
    if (!fit || (!has_signs && strcmp(operation, "tdpbsud"))) abort();
    for (int row = 0; row < shapes.rows[sums]; row++) {
        for (int column = 0; column < shapes.bytes[sums]; column += 4) {
            int32_t sum;
            memcpy(&sum, tiles[sums][row] + column, 4);
            for (int input = 0; input < shapes.bytes[states]; input++) {
                const uint8_t weight = tiles[weights][input / 4][column + input % 4];
                sum += (int8_t)tiles[states][row][input] * (has_signs ? (int8_t)weight : weight);
            }
            memcpy(tiles[sums][row] + column, &sum, 4);
        }
    }
}

}  // namespace specinfer
