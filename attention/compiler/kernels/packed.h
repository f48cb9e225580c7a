// Products with packed matrices, for compiled passes on a CPU: calls of the library that packed/products.py loads.

#pragma once

extern "C" void specinfer_packed_linear(
    const float*, const uint8_t* const*, int64_t, float*, int64_t, int64_t, int64_t);
extern "C" void specinfer_packed_rows(const int64_t*, const uint8_t*, float*, int64_t, int64_t);

namespace specinfer {

template <class Number>
inline Number* numbers_of(AtenTensorHandle tensor) {
    void* numbers;
    aoti_torch_get_data_ptr(tensor, &numbers);
    return (Number*)numbers;
}

inline const int64_t* sizes_of(AtenTensorHandle tensor) {
    int64_t* sizes;
    aoti_torch_get_sizes(tensor, &sizes);
    return sizes;
}

}  // namespace specinfer

// Called by the code that Inductor writes; they return 0.
template <class... Matrices>
inline AOTITorchError aoti_torch_specinfer_packed_linear(
    AtenTensorHandle results, AtenTensorHandle states, const Matrices&... packed) {
    using namespace specinfer;
    const uint8_t* matrices[] = {numbers_of<uint8_t>(packed)...};
    const int64_t *shape = sizes_of(results), inputs = sizes_of(states)[1];
    specinfer_packed_linear(
        numbers_of<float>(states), matrices, sizeof...(packed), numbers_of<float>(results), shape[0], inputs, shape[1]);
    return 0;
}
inline AOTITorchError aoti_torch_specinfer_packed_rows(
    AtenTensorHandle results, AtenTensorHandle rows, AtenTensorHandle packed) {
    using namespace specinfer;
    const int64_t* shape = sizes_of(results);
    specinfer_packed_rows(
        numbers_of<int64_t>(rows), numbers_of<uint8_t>(packed), numbers_of<float>(results), shape[0], shape[1]);
    return 0;
}
