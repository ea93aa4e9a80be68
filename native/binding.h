// From a C++ member function to a method of a Python class, for arguments that are numbers.
//
// `method<&Kernels::linear>("linear")` is a row of the class's table: it checks the count, converts
// each argument to the parameter's type, lets other Python threads run meanwhile, and turns a C++
// exception into a Python one. Python's stable interface: one build serves every version from 3.11.
#pragma once
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>

namespace headway {

template <class T>
T number_of(PyObject* object) {
    if constexpr (std::is_floating_point_v<T>) return static_cast<T>(PyFloat_AsDouble(object));
    else if constexpr (std::is_unsigned_v<T>)
        return static_cast<T>(PyLong_AsUnsignedLongLong(object));
    else return static_cast<T>(PyLong_AsLongLong(object));
}

inline PyObject* object_of(bool value) { return PyBool_FromLong(value); }
inline PyObject* object_of(int64_t value) { return PyLong_FromLongLong(value); }
inline PyObject* object_of(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }
inline PyObject* object_of(double value) { return PyFloat_FromDouble(value); }

// The C++ object inside a Python one.
template <class Owner>
struct Instance {
    PyObject_HEAD
    Owner* owner;
};

template <auto function>
struct Call;

template <class Owner, class Result, class... Arguments, Result (Owner::*function)(Arguments...)>
struct Call<function> {
    static PyObject* run(PyObject* self, PyObject* const* objects, Py_ssize_t count) {
        if (count != static_cast<Py_ssize_t>(sizeof...(Arguments)))
            return PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", count,
                                static_cast<Py_ssize_t>(sizeof...(Arguments)));
        return spread(self, objects, std::index_sequence_for<Arguments...>());
    }

private:
    template <size_t... at>
    static PyObject* spread(PyObject* self, PyObject* const* objects, std::index_sequence<at...>) {
        const std::tuple<Arguments...> arguments{number_of<Arguments>(objects[at])...};
        if (PyErr_Occurred()) return nullptr;
        Owner& owner = *reinterpret_cast<Instance<Owner>*>(self)->owner;
        PyThreadState* released = PyEval_SaveThread();
        try {
            if constexpr (std::is_void_v<Result>) {
                (owner.*function)(std::get<at>(arguments)...);
                PyEval_RestoreThread(released);
                Py_RETURN_NONE;
            } else {
                const Result result = (owner.*function)(std::get<at>(arguments)...);
                PyEval_RestoreThread(released);
                return object_of(result);
            }
        } catch (const std::exception& error) {
            PyEval_RestoreThread(released);
            PyErr_SetString(PyExc_ValueError, error.what());
            return nullptr;
        }
    }
};

template <auto function>
PyMethodDef method(const char* name) {
    auto* run = &Call<function>::run;
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
            nullptr};
}

}  // namespace headway
