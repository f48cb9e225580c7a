// Products with packed matrices, for compiled passes on a CPU: calls of the library that packed/products.py loads.

#pragma once

extern "C" void specinfer_packed_linear(const float*, const uint8_t*, float*, int64_t, int64_t, int64_t);
extern "C" void specinfer_packed_rows(const int64_t*, const uint8_t*, float*, int64_t, int64_t);

// Called by the code that Inductor writes; they return 0.
inline AOTITorchError aoti_torch_specinfer_packed_linear(
    AtenTensorHandle results, AtenTensorHandle states, AtenTensorHandle packed) {
    void *to, *from, *matrix;
    int64_t *shape, *sizes;
    aoti_torch_get_data_ptr(results, &to);
    aoti_torch_get_data_ptr(states, &from);
    aoti_torch_get_data_ptr(packed, &matrix);
    aoti_torch_get_sizes(results, &shape);
    aoti_torch_get_sizes(states, &sizes);
    specinfer_packed_linear((const float*)from, (const uint8_t*)matrix, (float*)to, shape[0], sizes[1], shape[1]);
    return 0;
}
inline AOTITorchError aoti_torch_specinfer_packed_rows(
    AtenTensorHandle results, AtenTensorHandle rows, AtenTensorHandle packed) {
    void *to, *from, *matrix;
    int64_t* shape;
    aoti_torch_get_data_ptr(results, &to);
    aoti_torch_get_data_ptr(rows, &from);
    aoti_torch_get_data_ptr(packed, &matrix);
    aoti_torch_get_sizes(results, &shape);
    specinfer_packed_rows((const int64_t*)from, (const uint8_t*)matrix, (float*)to, shape[0], shape[1]);
    return 0;
}
