// What a step teaches of the cost model: `perf/filter.py`, operation by operation.
//
// Sums are taken in the order of that file, and nothing is contracted (-ffp-contract=off), so that
// both give the same bits. The state is the caller's array: constants, logarithms, parts,
// covariance, and the covariance of what changes.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cmath>
#include <vector>

namespace {

enum Constant { clip, noise_squared, surprised, forget, num_knots, num_parts, num_constants };

struct State {
    double* constants;
    int64_t knots, parts;
    double *logs, *seconds, *covariance, *changes;
};

struct Work {
    int64_t above;
    double width, beyond, sampled, attended, read, predicted_s;
};

struct Share {
    int64_t part;
    double share;
};

// The nearest curve that never falls (`filter.isotonic_fit`): neighbours that fall share their mean.
void rise(const State& state) {
    struct Pool {
        double mean, weight;
        int64_t count;
    };
    std::vector<Pool> pools;
    for (int64_t at = 0; at < state.knots; ++at) {
        Pool pool{state.logs[at], 1 / state.covariance[at * (state.parts + 1)], 1};
        while (!pools.empty() && pools.back().mean > pool.mean) {
            const Pool& low = pools.back();
            const double both = low.weight + pool.weight;
            pool.mean = (low.mean * low.weight + pool.mean * pool.weight) / both;
            pool.weight = both;
            pool.count += low.count;
            pools.pop_back();
        }
        pools.push_back(pool);
    }
    int64_t at = 0;
    for (const Pool& pool : pools)
        for (int64_t count = 0; count < pool.count; ++count, ++at) {
            state.logs[at] = pool.mean;
            state.seconds[at] = std::exp(pool.mean);
        }
}

void learn(const State& state, const Work& work, double error) {
    const int64_t n = state.parts;
    const double* parts = state.seconds;
    const int64_t units = state.knots;
    const Share all[] = {
        {work.above - 1, (1 - work.beyond / work.width) * parts[work.above - 1] / work.predicted_s},
        {work.above, work.beyond / work.width * parts[work.above] / work.predicted_s},
        {units + 1, work.sampled * parts[units + 1] / work.predicted_s},
        {units + 2, work.attended * parts[units + 2] / work.predicted_s},
        {units + 3, work.read * parts[units + 3] / work.predicted_s},
        {units, parts[units] / work.predicted_s},
    };
    const int count = work.sampled ? 6 : 5;
    std::vector<double> memory(2 * n);
    double *spread = memory.data(), *scaled = spread + n, known = 0;
    for (int at = 0; at < count; ++at) {
        const double* row = state.covariance + all[at].part * n;
        for (int64_t j = 0; j < n; ++j) spread[j] += all[at].share * row[j];
    }
    for (int at = 0; at < count; ++at) known += all[at].share * spread[all[at].part];
    const double noise = state.constants[noise_squared];
    const double limit = state.constants[clip] * std::sqrt(known + noise);
    const double beyond = std::fabs(error) / limit, excess = beyond > 1 ? beyond : 1;
    const double variance = known + noise * excess, gain = error / excess / variance;
    const double rate = state.constants[excess > 1 ? surprised : forget];
    for (int64_t j = 0; j < n; ++j) {
        state.logs[j] += spread[j] * gain;
        scaled[j] = spread[j] / variance;
    }
    for (int64_t i = 0; i < n; ++i) {
        double* row = state.covariance + i * n;
        const double *change = state.changes + i * n, own = spread[i];
        for (int64_t j = 0; j < n; ++j) {
            const double left = row[j] - own * scaled[j];
            row[j] = left + (change[j] - left) * rate;
        }
    }
}

bool rises(const State& state) {
    for (int64_t at = 1; at < state.knots; ++at)
        if (state.seconds[at - 1] > state.seconds[at]) return false;
    return true;
}

PyObject* settled(const State& state) {
    for (int64_t at = 0; at < state.parts; ++at) state.seconds[at] = std::exp(state.logs[at]);
    if (!rises(state)) rise(state);
    PyObject* list = PyList_New(state.parts);
    for (int64_t at = 0; list != nullptr && at < state.parts; ++at) {
        PyObject* number = PyFloat_FromDouble(state.seconds[at]);
        if (number == nullptr || PyList_SetItem(list, at, number) != 0) {
            Py_DECREF(list);
            return nullptr;
        }
    }
    return list;
}

// The state in an array of doubles, or false with an error set.
bool read_state(const Py_buffer& view, State& state) {
    const int64_t doubles = view.len / int64_t(sizeof(double));
    double* first = static_cast<double*>(view.buf);
    if (doubles > num_constants) {
        const double knots = first[num_knots], parts = first[num_parts];
        if (knots >= 2 && parts == knots + 4 && doubles == num_constants + 2 * parts * (1 + parts)) {
            state.constants = first;
            state.knots = int64_t(knots), state.parts = int64_t(parts);
            state.logs = first + num_constants;
            state.seconds = state.logs + state.parts;
            state.covariance = state.seconds + state.parts;
            state.changes = state.covariance + state.parts * state.parts;
            return true;
        }
    }
    PyErr_SetString(PyExc_ValueError, "this is no state of the cost model");
    return false;
}

// (state, above, width, beyond, sampled, attended, read, predicted_s, error) → the parts.
PyObject* learn_step(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 9) return PyErr_Format(PyExc_TypeError, "%zd arguments, not 9", count);
    double numbers[7];
    const int64_t above = PyLong_AsLongLong(given[1]);
    for (int at = 0; at < 7; ++at) numbers[at] = PyFloat_AsDouble(given[at + 2]);
    if (PyErr_Occurred()) return nullptr;
    Py_buffer view;
    if (PyObject_GetBuffer(given[0], &view, PyBUF_WRITABLE) != 0) return nullptr;
    State state;
    PyObject* list = nullptr;
    if (read_state(view, state)) {
        if (above < 1 || above >= state.knots)
            PyErr_Format(PyExc_ValueError, "there is no knot %lld", (long long)above);
        else {
            learn(state, {above, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]},
                  numbers[6]);
            list = settled(state);
        }
    }
    PyBuffer_Release(&view);
    return list;
}

PyMethodDef functions[] = {
    {"learn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(learn_step)), METH_FASTCALL,
     "A step of the filter on the state; the parts, in seconds."},
    {},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_learning",
                          "The cost model's filter; headway.engine.learning is its face.", -1,
                          functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__learning() {
    PyObject* module = PyModule_Create(&definition);
    if (module != nullptr && PyModule_AddIntConstant(module, "layout", 1) == 0) return module;
    Py_XDECREF(module);
    return nullptr;
}
