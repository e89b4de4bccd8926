/* Names of blocks of tokens, eight bytes each: names.py says what this does. A keyed hash by products of 64 bits, whose key is
 * this process's own. The caller holds the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LANES 4
#define STRIDE (16 * LANES) /* bytes taken at once */

static uint64_t key[2 * LANES + 2];

static uint64_t folded(uint64_t a, uint64_t b)
{
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t word(const char *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

/* One of the lanes takes 16 bytes. */
static uint64_t taken(uint64_t state, const char *at, int lane)
{
    return folded(word(at) ^ key[2 * lane], word(at + 8) ^ state);
}

/* Of all bytes and of how many they are; what is short of 16 is filled up with zeros. */
static uint64_t hashed(uint64_t state, const char *data, Py_ssize_t count)
{
    uint64_t lanes[LANES];
    Py_ssize_t at = 0;
    for (int lane = 0; lane < LANES; lane++) {
        lanes[lane] = state ^ key[2 * lane + 1];
    }
    for (; at + STRIDE <= count; at += STRIDE) {
        for (int lane = 0; lane < LANES; lane++) {
            lanes[lane] = taken(lanes[lane], data + at + 16 * lane, lane);
        }
    }
    for (int lane = 0; at < count; at += 16, lane++) {
        char last[16] = {0};
        memcpy(last, data + at, count - at < 16 ? count - at : 16);
        lanes[lane] = taken(lanes[lane], last, lane);
    }
    uint64_t sum = state ^ (uint64_t)count;
    for (int lane = 0; lane < LANES; lane++) {
        sum = folded(lanes[lane] ^ key[2 * LANES], sum ^ key[2 * LANES + 1]) + lane;
    }
    return sum;
}

/* A number in [least, limit], or -1 and an error. */
static Py_ssize_t number(PyObject *object, Py_ssize_t least, Py_ssize_t limit)
{
    Py_ssize_t value = PyLong_AsSsize_t(object);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (value < least || value > limit) {
        PyErr_Format(PyExc_AssertionError, "byte %zd is not in [%zd, %zd]", value, least, limit);
        return -1;
    }
    return value;
}

static PyObject *name_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        return PyErr_Format(PyExc_TypeError, "name_of takes two bytes and two numbers");
    }
    Py_ssize_t first, last;
    if ((last = number(args[3], 0, PyBytes_GET_SIZE(args[1]))) < 0 || (first = number(args[2], 0, last)) < 0) {
        return NULL;
    }
    uint64_t name = hashed(0, PyBytes_AS_STRING(args[0]), PyBytes_GET_SIZE(args[0]));
    name = hashed(name, PyBytes_AS_STRING(args[1]) + first, last - first);
    return PyBytes_FromStringAndSize((const char *)&name, sizeof(name));
}

/* The names of consecutive rows of a run, each behind the one before: eight bytes a row. */
static PyObject *names_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        return PyErr_Format(PyExc_TypeError, "names_of takes two bytes and three numbers");
    }
    Py_ssize_t length = PyBytes_GET_SIZE(args[1]), count, step, size;
    if ((count = number(args[2], 0, length)) < 0 || (step = number(args[3], 1, PY_SSIZE_T_MAX)) < 0 ||
        (size = number(args[4], step, PY_SSIZE_T_MAX)) < 0) {
        return NULL;
    }
    if (count > 0 && (size > length || (count - 1) > (length - size) / step)) {
        return PyErr_Format(PyExc_AssertionError, "%zd rows of %zd bytes, %zd apart, of %zd", count, size, step, length);
    }
    PyObject *names = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint64_t));
    if (names == NULL) {
        return NULL;
    }
    char *out = PyBytes_AS_STRING(names);
    const char *run = PyBytes_AS_STRING(args[1]), *prior = PyBytes_AS_STRING(args[0]);
    Py_ssize_t prior_size = PyBytes_GET_SIZE(args[0]);
    for (Py_ssize_t row = 0; row < count; row++) {
        uint64_t name = hashed(hashed(0, prior, prior_size), run + row * step, size);
        memcpy(out, &name, sizeof(name));
        prior = out;
        prior_size = sizeof(name);
        out += sizeof(name);
    }
    return names;
}

static int make_key(void)
{
    PyObject *os = PyImport_ImportModule("os");
    PyObject *found = os == NULL ? NULL : PyObject_CallMethod(os, "urandom", "n", (Py_ssize_t)sizeof(key));
    int good = found != NULL && PyBytes_CheckExact(found) && PyBytes_GET_SIZE(found) == (Py_ssize_t)sizeof(key);
    if (good) {
        memcpy(key, PyBytes_AS_STRING(found), sizeof(key));
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "no key for names");
    }
    Py_XDECREF(found);
    Py_XDECREF(os);
    return good ? 0 : -1;
}

static PyMethodDef methods[] = {
    {"name_of", (PyCFunction)(void (*)(void))name_of, METH_FASTCALL, NULL},
    {"names_of", (PyCFunction)(void (*)(void))names_of, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_names", NULL, -1, methods};

PyMODINIT_FUNC PyInit__names(void)
{
    return make_key() < 0 ? NULL : PyModule_Create(&module);
}
