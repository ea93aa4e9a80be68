// The Python module: a `Kernels` object is a table of functions and a pool of threads.
//
// Addresses are integers, as torch's data_ptr gives them; nothing here knows torch. The caller
// keeps the memory alive and of the size that each operation names, and calls from one thread.
#include "binding.h"
#include "pool.h"
#include "program.h"
#include "table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace headway;
using Address = uintptr_t;

#if defined(HEADWAY_HAS_AMX)

// Whether the CPU has matrix tiles, in int8 and bf16, and the system lets this process use them.
bool tiles_are_granted() {
#if defined(__linux__)
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    constexpr uint32_t wanted = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & wanted) != wanted) return false;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

#endif

std::vector<const Table*> runnable() {
    std::vector<const Table*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#if defined(HEADWAY_HAS_AMX)
    const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16") &&
                          __builtin_cpu_supports("avx512vbmi");
    if (has_bf16 && tiles_are_granted()) found.push_back(&amx_table);
    // One vdpbf16ps takes an Intel core as long as four fused multiply-adds, an AMD core one.
    const bool pays = __builtin_cpu_is("amd");
    if (has_bf16 && pays) found.push_back(&avx512_bf16_table);
#endif
    if (has_avx512) found.push_back(&avx512_table);
#if defined(HEADWAY_HAS_AMX)
    if (has_bf16 && !pays) found.push_back(&avx512_bf16_table);
#endif
    if (has_avx2) found.push_back(&avx2_table);
#endif
    found.push_back(&portable_table);
    return found;
}

const Table& table_named(const std::string& name) {
    for (const Table* table : runnable())
        if (name == table->name) return *table;
    throw std::invalid_argument("this CPU does not run the kernels for " + name);
}

template <class T = void>
T* at(Address address) { return reinterpret_cast<T*>(address); }

class Kernels {
public:
    Kernels(const std::string& isa, int threads) : table_(table_named(isa)), pool_(threads) {}

    int64_t lanes() { return table_.lanes; }

    void pack_linear(Address weight, Address packed, int64_t outputs, int64_t inputs, int type) {
        table_.pack_linear(pool_, at(weight), at(packed), outputs, inputs, Type(type));
    }

    void linear(Address x, Address packed, Address bias, Address y, Address scratch,
                int64_t tokens, int64_t inputs, int64_t outputs, int type, int weight_type) {
        table_.linear(pool_, {at(x), at(packed), at(bias), at(y), at<float>(scratch), tokens,
                              inputs, outputs, Type(type), Type(weight_type), {}});
    }

    void linear_fp8(Address x, Address packed, Address scales, Address bias, Address y,
                    Address scratch, int64_t tokens, int64_t inputs, int64_t outputs,
                    int64_t group, int type) {
        table_.linear(pool_, {at(x), at(packed), at(bias), at(y), at<float>(scratch), tokens,
                              inputs, outputs, Type(type), Type::f8, {}, 0, at<float>(scales),
                              group});
    }

    void norm(Address x, Address weight, Address y, int64_t rows, int64_t width, int64_t inner,
              int64_t outer_stride, int64_t inner_stride, float eps, float offset, int type) {
        table_.norm(pool_, {at(x), at(weight), at(y), rows, width, inner, outer_stride,
                            inner_stride, eps, offset, Type(type)});
    }

    void rope(Address x, Address y, Address cosines, Address sines, int64_t tokens, int64_t heads,
              int64_t size, int64_t half, int64_t x_token_stride, int64_t x_head_stride,
              int64_t y_token_stride, int64_t y_head_stride, int type) {
        table_.rope(pool_, {at(x), at(y), at<float>(cosines), at<float>(sines), nullptr, tokens,
                            heads, size, half, x_token_stride, x_head_stride, y_token_stride,
                            y_head_stride, Type(type)});
    }

    void gated(Address x, Address y, int64_t tokens, int64_t inner, int type, int activation) {
        table_.gated(pool_, {at(x), at(y), tokens, inner, Type(type), Activation(activation)});
    }

    void add(Address x, Address added, Address y, int64_t tokens, int64_t width, float factor,
             int type) {
        table_.add(pool_, {at(x), at(added), at(y), tokens, width, factor, Type(type)});
    }

    void run(Address operations, int64_t count, int64_t tokens, int64_t sequences,
             Address token_ids, Address positions, Address query_lens, Address groups,
             Address buffers, Address reads) {
        headway::run(table_, pool_, at<Operation>(operations), count,
                     {tokens, sequences, at<int64_t>(token_ids), at<int64_t>(positions),
                      at<int64_t>(query_lens), at<KVGroup>(groups), at<char*>(buffers),
                      at<int64_t>(reads)});
    }

    bool are_finite(Address x, int64_t count, int type) {
        return table_.are_finite(pool_, at(x), count, Type(type));
    }

    uint64_t read_words(Address base, int64_t bytes) {
        return table_.read_words(pool_, at(base), bytes);
    }

    int64_t sampling_bytes(int64_t vocabulary) {
        return table_.sampling_bytes(vocabulary) * pool_.threads();
    }

    void sample(Address draws, int64_t rows, int64_t vocabulary, int64_t allowed_bytes,
                Address scratch, Address tokens) {
        table_.sample(pool_, at<Draw>(draws), rows, vocabulary, allowed_bytes, at(scratch),
                      at<int64_t>(tokens));
    }

    void logprobs(Address logits, int type, int64_t rows, int64_t vocabulary, Address tokens,
                  int64_t count, Address scratch, Address values, Address ranks,
                  Address top_tokens) {
        table_.logprobs(pool_, at(logits), Type(type), rows, vocabulary, at<int64_t>(tokens), count,
                        at(scratch), at<float>(values), at<int64_t>(ranks),
                        at<int64_t>(top_tokens));
    }

    void pack_quantized(Address levels, Address scales, Address offsets, Address packed,
                        int64_t outputs, int64_t inputs, int64_t layout) {
        table_.pack_quantized(pool_, {at<int8_t>(levels), at(scales), at(offsets), at(packed),
                                      outputs, inputs, layout});
    }

    void round_weight(Address weight, Address packed, Address scales, int64_t outputs,
                      int64_t inputs, int64_t layout, int type) {
        table_.round_weight(pool_, {at(weight), at(packed), at<float>(scales), outputs, inputs,
                                    layout, Type(type)});
    }

    void quantize_rows(Address x, Address q, Address scales, Address starts, Address sums,
                       Address order, int64_t tokens, int64_t inputs, int64_t layout, int type) {
        table_.quantize_rows(pool_, {at(x), at<int8_t>(q), at<float>(scales), at<int32_t>(starts),
                                     tokens, inputs, layout, Type(type), at<float>(sums),
                                     at<int32_t>(order)});
    }

    void quantized(Address q, Address scales, Address starts, Address sums, Address packed,
                   Address weight_scales, Address bias, Address y, int64_t tokens, int64_t inputs,
                   int64_t outputs, int64_t layout, int type) {
        table_.quantized(pool_, {at<int8_t>(q), at<float>(scales), at<int32_t>(starts), at(packed),
                                 at<float>(weight_scales), at(bias), at(y), tokens, inputs, outputs,
                                 layout, Type(type), at<float>(sums), {}});
    }

    void write_kv(Address k, Address v, int64_t k_step, int64_t v_step, Address slots,
                  int64_t tokens, int type, Address to_k, Address to_v, Address k_scale,
                  Address v_scale, Address bounds, int64_t kv_heads, int64_t head_dim,
                  int64_t block_size, int kv_type, int paired) {
        const KVMemory to = memory(to_k, to_v, k_scale, v_scale, bounds, kv_heads, head_dim,
                                   block_size, kv_type, paired);
        table_.write_kv(pool_, {at(k), at(v), k_step, v_step, at<int64_t>(slots), tokens,
                                Type(type), to});
    }

    void attention(Address q, Address out, int64_t q_step, Address tables, Address query_lens,
                   Address context_lens, int64_t sequences, int64_t width, int64_t heads,
                   int64_t window, int64_t sinks, float scale, float softcap, Address sink_logits,
                   Address reads, int type, Address k, Address v, Address k_scale,
                   Address v_scale, Address bounds, int64_t kv_heads, int64_t head_dim,
                   int64_t block_size, int kv_type, int paired) {
        const KVMemory kv = memory(k, v, k_scale, v_scale, bounds, kv_heads, head_dim, block_size,
                                   kv_type, paired);
        table_.attention(pool_, {at(q), at(out), q_step, at<int64_t>(tables),
                                 at<int64_t>(query_lens), at<int64_t>(context_lens), sequences,
                                 width, heads, window, sinks, scale, softcap, at(sink_logits),
                                 Type(type), kv, {}, nullptr, at<int64_t>(reads)});
    }

    void attention_dealt(Address q, Address out, int64_t q_step, Address tables,
                         Address query_lens, Address context_lens, int64_t sequences, int64_t width,
                         int64_t heads, float scale, float softcap, Address sink_logits, int type,
                         int64_t rank, int64_t ranks, Address own, Address all, Address k,
                         Address v, Address k_scale, Address v_scale, Address bounds,
                         int64_t kv_heads, int64_t head_dim, int64_t block_size, int kv_type,
                         int paired) {
        const KVMemory kv = memory(k, v, k_scale, v_scale, bounds, kv_heads, head_dim, block_size,
                                   kv_type, paired);
        table_.attention_dealt(pool_,
                               {at(q), at(out), q_step, at<int64_t>(tables),
                                at<int64_t>(query_lens), at<int64_t>(context_lens), sequences,
                                width, heads, 0, 0, scale, softcap, at(sink_logits), Type(type), kv},
                               {rank, ranks, at<float>(own), at<float>(all)});
    }

    void round_kv(Address tables, Address open_tables, Address query_lens, Address context_lens,
                  int64_t sequences, int64_t width, Address open_k, Address open_v,
                  Address open_k_scale, Address open_v_scale, Address open_bounds,
                  int64_t open_heads, int64_t open_dim, int64_t open_size, int open_type,
                  int open_paired, Address k, Address v, Address k_scale, Address v_scale,
                  Address bounds, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                  int kv_type, int paired) {
        const KVMemory open = memory(open_k, open_v, open_k_scale, open_v_scale, open_bounds,
                                     open_heads, open_dim, open_size, open_type, open_paired);
        const KVMemory kv = memory(k, v, k_scale, v_scale, bounds, kv_heads, head_dim, block_size,
                                   kv_type, paired);
        table_.round_kv(pool_, {open, kv, at<int64_t>(tables), at<int64_t>(open_tables),
                                at<int64_t>(query_lens), at<int64_t>(context_lens), sequences,
                                width});
    }

    void attention_rounded(Address q, Address out, int64_t q_step, Address tables,
                           Address open_tables, Address query_lens, Address context_lens,
                           int64_t sequences, int64_t width, int64_t heads, int64_t window,
                           float scale, float softcap, Address sink_logits, int type,
                           Address open_k, Address open_v, Address open_k_scale,
                           Address open_v_scale, Address open_bounds, int64_t open_heads,
                           int64_t open_dim, int64_t open_size, int open_type, int open_paired,
                           Address k, Address v, Address k_scale, Address v_scale, Address bounds,
                           int64_t kv_heads, int64_t head_dim, int64_t block_size, int kv_type,
                           int paired) {
        const KVMemory open = memory(open_k, open_v, open_k_scale, open_v_scale, open_bounds,
                                     open_heads, open_dim, open_size, open_type, open_paired);
        const KVMemory kv = memory(k, v, k_scale, v_scale, bounds, kv_heads, head_dim, block_size,
                                   kv_type, paired);
        table_.attention(pool_, {at(q), at(out), q_step, at<int64_t>(tables),
                                 at<int64_t>(query_lens), at<int64_t>(context_lens), sequences,
                                 width, heads, window, 0, scale, softcap, at(sink_logits),
                                 Type(type), kv, open, at<int64_t>(open_tables)});
    }

private:
    static KVMemory memory(Address k, Address v, Address k_scale, Address v_scale, Address bounds,
                           int64_t kv_heads, int64_t head_dim, int64_t block_size, int type,
                           int paired) {
        return {at(k), at(v), at<float>(k_scale), at<float>(v_scale), at<uint16_t>(bounds),
                kv_heads, head_dim, block_size, Type(type), paired != 0};
    }

    const Table& table_;
    Pool pool_;
};

// ── the class and the module ────────────────────────────────────────────────────────────────

PyMethodDef methods[] = {
    method<&Kernels::lanes>("lanes"),
    method<&Kernels::pack_linear>("pack_linear"),
    method<&Kernels::linear>("linear"),
    method<&Kernels::linear_fp8>("linear_fp8"),
    method<&Kernels::norm>("norm"),
    method<&Kernels::rope>("rope"),
    method<&Kernels::gated>("gated"),
    method<&Kernels::add>("add"),
    method<&Kernels::run>("run"),
    method<&Kernels::are_finite>("are_finite"),
    method<&Kernels::read_words>("read_words"),
    method<&Kernels::sampling_bytes>("sampling_bytes"),
    method<&Kernels::sample>("sample"),
    method<&Kernels::logprobs>("logprobs"),
    method<&Kernels::pack_quantized>("pack_quantized"),
    method<&Kernels::round_weight>("round_weight"),
    method<&Kernels::quantize_rows>("quantize_rows"),
    method<&Kernels::quantized>("quantized"),
    method<&Kernels::write_kv>("write_kv"),
    method<&Kernels::attention>("attention"),
    method<&Kernels::attention_dealt>("attention_dealt"),
    method<&Kernels::round_kv>("round_kv"),
    method<&Kernels::attention_rounded>("attention_rounded"),
    {},
};

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
    const char* isa;
    int threads;
    if (!PyArg_ParseTuple(arguments, "si", &isa, &threads)) return nullptr;
    auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* self = allocate(type, 0);
    if (self == nullptr) return nullptr;
    try {
        reinterpret_cast<Instance<Kernels>*>(self)->owner = new Kernels(isa, threads);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
        Py_DECREF(self);
        return nullptr;
    }
    return self;
}

void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    delete reinterpret_cast<Instance<Kernels>*>(self)->owner;
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {0, nullptr},
};
PyType_Spec spec = {"headway.runtime.native._native.Kernels", sizeof(Instance<Kernels>), 0,
                    Py_TPFLAGS_DEFAULT, slots};

PyObject* instruction_sets(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (const Table* table : runnable()) {
        PyObject* name = PyUnicode_FromString(table->name);
        PyList_Append(names, name);
        Py_DECREF(name);
    }
    return names;
}

PyMethodDef functions[] = {
    {"instruction_sets", instruction_sets, METH_NOARGS,
     "Names of the instruction sets this CPU runs, best first."},
    {},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native",
                          "Kernels on raw memory; headway.runtime.native is their face.", -1,
                          functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* module = PyModule_Create(&definition);
    PyObject* type = PyType_FromSpec(&spec);
    if (module != nullptr && type != nullptr &&
        PyModule_AddObjectRef(module, "Kernels", type) == 0 &&
        PyModule_AddIntConstant(module, "operation_bytes", sizeof(headway::Operation)) == 0 &&
        PyModule_AddIntConstant(module, "group_bytes", sizeof(headway::KVGroup)) == 0 &&
        PyModule_AddIntConstant(module, "num_codes", headway::num_codes) == 0)
        return module;
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
}
