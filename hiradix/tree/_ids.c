/* Arrays of page ids and tokens, and what the garbage collector looks at: ids.py says what these do, and ids_numpy.py,
 * whose functions have the same names, is what they are tested against. Ids are checked before anything is read or written
 * through them. The caller holds the GIL. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <string.h>

#define IDS(array) ((npy_int32 *)PyArray_DATA(array))
#define FLAGS(array) ((npy_bool *)PyArray_DATA(array))
#define TOKENS(array) ((npy_int64 *)PyArray_DATA(array))
#define LENGTH(array) (PyArray_DIM(array, 0))
#define BLOCK 256 /* tokens compared before the next look whether one differs */

static int is_plain(PyObject *object, int type)
{
    return PyArray_Check(object) && PyArray_TYPE((PyArrayObject *)object) == type
        && PyArray_NDIM((PyArrayObject *)object) == 1 && PyArray_ISCARRAY_RO((PyArrayObject *)object);
}

/* `object`, borrowed, if it is a writable array of `type`; else NULL and TypeError. */
static PyArrayObject *own_array(PyObject *object, int type, const char *name)
{
    if (is_plain(object, type) && PyArray_ISWRITEABLE((PyArrayObject *)object)) {
        return (PyArrayObject *)object;
    }
    PyErr_Format(PyExc_TypeError, "%s is no writable array of its type: %R", name, (PyObject *)Py_TYPE(object));
    return NULL;
}

/* Integers of any width as an array of `type`, those that do not fit cut to it: a new reference. NULL and TypeError
 * for what is no integer. */
static PyArrayObject *integers(PyObject *object, int type)
{
    int cast = PyArray_Check(object) && PyArray_ISINTEGER((PyArrayObject *)object) ? NPY_ARRAY_FORCECAST : 0;
    return (PyArrayObject *)PyArray_FROMANY(object, type, 1, 1, NPY_ARRAY_IN_ARRAY | cast);
}

/* Page ids a caller gave, as an int32 array: a new reference. NULL and AssertionError for what is no id. */
static PyArrayObject *given(PyObject *object)
{
    if (is_plain(object, NPY_INT32)) {
        Py_INCREF(object);
        return (PyArrayObject *)object;
    }
    PyArrayObject *wide = integers(object, NPY_INT64);
    if (wide == NULL) {
        return NULL;
    }
    int is_unsigned = PyArray_Check(object) && PyArray_ISUNSIGNED((PyArrayObject *)object);
    npy_intp count = LENGTH(wide);
    PyArrayObject *ids = (PyArrayObject *)PyArray_SimpleNew(1, &count, NPY_INT32);
    for (npy_intp i = 0; ids != NULL && i < count; i++) {
        npy_int64 id = ((npy_int64 *)PyArray_DATA(wide))[i];
        if (id < (is_unsigned ? 0 : NPY_MIN_INT32) || id > NPY_MAX_INT32) {
            PyErr_Format(PyExc_AssertionError, "%lld is no page id", (long long)id);
            Py_CLEAR(ids);
        } else {
            IDS(ids)[i] = (npy_int32)id;
        }
    }
    Py_DECREF(wide);
    return ids;
}

/* Tokens a caller gave, as an int64 array: a new reference. */
static PyArrayObject *tokens_of(PyObject *object)
{
    if (is_plain(object, NPY_INT64)) {
        Py_INCREF(object);
        return (PyArrayObject *)object;
    }
    return (PyArrayObject *)PyArray_FROMANY(object, NPY_INT64, 1, 1, NPY_ARRAY_IN_ARRAY);
}

static int has_args(const char *name, Py_ssize_t given_args, Py_ssize_t wanted)
{
    if (given_args != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given_args);
    }
    return given_args == wanted;
}

/* A number in [0, limit], or -1 and an error. */
static npy_intp number(PyObject *object, npy_intp limit, const char *name)
{
    Py_ssize_t value = PyLong_AsSsize_t(object);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (value < 0 || value > limit) {
        PyErr_Format(PyExc_AssertionError, "%s is %zd, not in [0, %zd]", name, value, (Py_ssize_t)limit);
        return -1;
    }
    return value;
}

static PyObject *copied(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 1 && !has_args("copied", nargs, 3)) {
        return NULL;
    }
    PyArrayObject *pages = given(args[0]), *found = NULL;
    if (pages == NULL) {
        return NULL;
    }
    npy_intp first = 0, last = LENGTH(pages);
    if (nargs == 3) {
        last = number(args[2], last, "last");
        first = last < 0 ? -1 : number(args[1], last, "first");
    }
    if (first >= 0) {
        npy_intp count = last - first;
        found = (PyArrayObject *)PyArray_SimpleNew(1, &count, NPY_INT32);
        if (found != NULL) {
            memcpy(IDS(found), IDS(pages) + first, count * sizeof(npy_int32));
        }
    }
    Py_DECREF(pages);
    return (PyObject *)found;
}

/* Set the marks of pages to `value` as far as none has it yet; the number of those. */
static npy_intp turned(PyArrayObject *marks, PyArrayObject *pages, npy_bool value)
{
    npy_intp end = LENGTH(marks), count = LENGTH(pages), i;
    for (i = 0; i < count; i++) {
        npy_int32 page = IDS(pages)[i];
        if (page < 0 || page >= end || FLAGS(marks)[page] == value) {
            break;
        }
        FLAGS(marks)[page] = value;
    }
    return i;
}

static PyObject *claim(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *marks, *pages;
    if (!has_args("claim", nargs, 2) || (marks = own_array(args[0], NPY_BOOL, "marks")) == NULL
        || (pages = given(args[1])) == NULL) {
        return NULL;
    }
    npy_intp count = LENGTH(pages), done = turned(marks, pages, 1);
    for (npy_intp i = 0; done != count && i < done; i++) {
        FLAGS(marks)[IDS(pages)[i]] = 0;
    }
    Py_DECREF(pages);
    return PyBool_FromLong(done == count);
}

static PyObject *joined(PyObject *self, PyObject *parts)
{
    if (!PyList_CheckExact(parts)) {
        return PyErr_Format(PyExc_TypeError, "joined takes a list, not %R", (PyObject *)Py_TYPE(parts));
    }
    npy_intp count = 0, at = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts); i++) {
        if (!is_plain(PyList_GET_ITEM(parts, i), NPY_INT32)) {
            return PyErr_Format(PyExc_TypeError, "part %zd is no array of int32", i);
        }
        count += LENGTH((PyArrayObject *)PyList_GET_ITEM(parts, i));
    }
    PyArrayObject *found = (PyArrayObject *)PyArray_SimpleNew(1, &count, NPY_INT32);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(parts); i++) {
        PyArrayObject *part = (PyArrayObject *)PyList_GET_ITEM(parts, i);
        memcpy(IDS(found) + at, IDS(part), LENGTH(part) * sizeof(npy_int32));
        at += LENGTH(part);
    }
    return (PyObject *)found;
}

static PyObject *mark(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *marks, *pages;
    int value;
    if (!has_args("mark", nargs, 3) || (marks = own_array(args[0], NPY_BOOL, "marks")) == NULL
        || (value = PyObject_IsTrue(args[2])) < 0 || (pages = given(args[1])) == NULL) {
        return NULL;
    }
    npy_intp end = LENGTH(marks), count = LENGTH(pages), i;
    for (i = 0; i < count; i++) {
        if (IDS(pages)[i] < 0 || IDS(pages)[i] >= end) {
            PyErr_Format(PyExc_AssertionError, "page %d is not in 0..%zd", IDS(pages)[i], (Py_ssize_t)end - 1);
            Py_DECREF(pages);
            return NULL;
        }
    }
    for (i = 0; i < count; i++) {
        FLAGS(marks)[IDS(pages)[i]] = (npy_bool)value;
    }
    Py_DECREF(pages);
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *stack, *marks, *found;
    npy_intp num_free, count;
    if (!has_args("take", nargs, 4) || (stack = own_array(args[0], NPY_INT32, "stack")) == NULL
        || (num_free = number(args[1], LENGTH(stack), "num_free")) < 0
        || (count = number(args[2], num_free, "count")) < 0
        || (marks = own_array(args[3], NPY_BOOL, "marks")) == NULL
        || (found = (PyArrayObject *)PyArray_SimpleNew(1, &count, NPY_INT32)) == NULL) {
        return NULL;
    }
    for (npy_intp i = 0; i < count; i++) {
        npy_int32 page = IDS(stack)[num_free - 1 - i];
        if (page < 0 || page >= LENGTH(marks)) {
            Py_DECREF(found);
            return PyErr_Format(PyExc_AssertionError, "free page %d of %zd", page, (Py_ssize_t)LENGTH(marks));
        }
        IDS(found)[i] = page;
    }
    for (npy_intp i = 0; i < count; i++) {
        FLAGS(marks)[IDS(found)[i]] = 1;
    }
    return (PyObject *)found;
}

static PyObject *give(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *stack, *marks, *pages;
    npy_intp num_free;
    if (!has_args("give", nargs, 4) || (stack = own_array(args[0], NPY_INT32, "stack")) == NULL
        || (num_free = number(args[1], LENGTH(stack), "num_free")) < 0
        || (marks = own_array(args[3], NPY_BOOL, "marks")) == NULL) {
        return NULL;
    }
    if ((pages = given(args[2])) == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AssertionError)) {
            return NULL;
        }
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    npy_intp count = LENGTH(pages), done = 0;
    if (count <= LENGTH(stack) - num_free) {
        done = turned(marks, pages, 0);
        for (npy_intp i = 0; i < done; i++) {
            if (done == count) {
                IDS(stack)[num_free + i] = IDS(pages)[count - 1 - i];
            } else {
                FLAGS(marks)[IDS(pages)[i]] = 1;
            }
        }
    }
    Py_DECREF(pages);
    return PyBool_FromLong(done == count);
}

static PyObject *slots_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    PyArrayObject *pages, *found;
    npy_intp size;
    if (!has_args("slots_of", nargs, 2) || (size = number(args[1], NPY_MAX_INT32, "page_size")) < 0
        || (pages = given(args[0])) == NULL) {
        return NULL;
    }
    npy_intp count = LENGTH(pages), num_slots = count * size;
    found = (PyArrayObject *)PyArray_SimpleNew(1, &num_slots, NPY_INT64);
    if (found != NULL) {
        npy_int64 *slots = PyArray_DATA(found);
        for (npy_intp i = 0; size == 1 && i < count; i++) {
            slots[i] = IDS(pages)[i];
        }
        for (npy_intp i = 0; size != 1 && i < count; i++, slots += size) {
            npy_int64 first = (npy_int64)IDS(pages)[i] * size;
            for (npy_intp j = 0; j < size; j++) {
                slots[j] = first + j;
            }
        }
    }
    Py_DECREF(pages);
    return (PyObject *)found;
}

/* Slots at an address, int32 if narrow, else int64. */
typedef struct {
    const void *at;
    int is_narrow;
    npy_intp length;
} Slots;

/* The pages of every `size`-th of slots [start, stop), which are numbers: a new array, or NULL and an error. */
static PyObject *pages_from(Slots slots, npy_intp size, PyObject *start_number, PyObject *stop_number)
{
    npy_intp start, stop;
    if (size == 0) {
        return PyErr_Format(PyExc_AssertionError, "page_size is 0");
    }
    if ((stop = number(stop_number, slots.length, "stop")) < 0 || (start = number(start_number, stop, "start")) < 0) {
        return NULL;
    }
    npy_intp count = (stop - start) / size + ((stop - start) % size != 0);
    PyObject *found = PyArray_SimpleNew(1, &count, NPY_INT32);
    if (found == NULL) {
        return NULL;
    }
    npy_int32 *pages = IDS((PyArrayObject *)found);
    const npy_int32 *narrow = slots.at;
    const npy_int64 *wide = slots.at;
    if (size == 1 && slots.is_narrow) {
        memcpy(pages, narrow + start, count * sizeof(npy_int32));
        return found;
    }
    for (npy_intp i = 0; size == 1 && i < count; i++) {
        pages[i] = (npy_int32)wide[start + i];
    }
    for (npy_intp i = 0, at = start; size != 1 && i < count; i++, at += size) {
        npy_int64 slot = slots.is_narrow ? narrow[at] : wide[at];
        pages[i] = (npy_int32)(slot / size - (slot % size < 0)); /* rounded down, as in Python */
    }
    return found;
}

static PyObject *pages_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    npy_intp size;
    if (!has_args("pages_of", nargs, 4) || (size = number(args[1], NPY_MAX_INT32, "page_size")) < 0) {
        return NULL;
    }
    int type = is_plain(args[0], NPY_INT32) ? NPY_INT32 : NPY_INT64;
    PyArrayObject *slots = integers(args[0], type);
    if (slots == NULL) {
        return NULL;
    }
    Slots given_slots = {PyArray_DATA(slots), type == NPY_INT32, LENGTH(slots)};
    PyObject *found = pages_from(given_slots, size, args[2], args[3]);
    Py_DECREF(slots);
    return found;
}

static PyObject *pages_at(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Slots slots;
    npy_intp size;
    if (!has_args("pages_at", nargs, 6) || (size = number(args[3], NPY_MAX_INT32, "page_size")) < 0
        || (slots.length = number(args[2], NPY_MAX_INTP, "length")) < 0
        || (slots.is_narrow = PyObject_IsTrue(args[1])) < 0) {
        return NULL;
    }
    slots.at = PyLong_AsVoidPtr(args[0]);
    if (slots.at == NULL && PyErr_Occurred()) {
        return NULL;
    }
    if (slots.at == NULL && slots.length) {
        return PyErr_Format(PyExc_AssertionError, "%zd slots at no address", (Py_ssize_t)slots.length);
    }
    return pages_from(slots, size, args[4], args[5]);
}

/* Tokens as bytes of int32; None if one of them does not fit. */
static PyObject *narrowed(const npy_int64 *wide, npy_intp count)
{
    PyObject *found = PyBytes_FromStringAndSize(NULL, count * sizeof(npy_int32));
    if (found == NULL) {
        return NULL;
    }
    npy_int32 *packed = (npy_int32 *)PyBytes_AS_STRING(found);
    npy_int64 bits = 0;
    for (npy_intp i = 0; i < count; i++) {
        bits |= wide[i];
        packed[i] = (npy_int32)wide[i];
    }
    if (bits < 0 || bits > NPY_MAX_INT32) {
        Py_DECREF(found);
        found = Py_NewRef(Py_None);
    }
    return found;
}

/* 1, and `view` to be released, if `object` is an array('q') or the like: its memory as it is. Else 0. */
static int is_buffer_of_tokens(PyObject *object, Py_buffer *view)
{
    if (PyArray_Check(object) || !PyObject_CheckBuffer(object)) {
        return 0;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    if (view->ndim == 1 && view->itemsize == sizeof(npy_int64) && (npy_uintp)view->buf % sizeof(npy_int64) == 0
        && view->format != NULL && strcmp(view->format, "q") == 0) {
        return 1;
    }
    PyBuffer_Release(view);
    return 0;
}

static PyObject *narrow(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    npy_intp start, stop, count;
    PyArrayObject *tokens = NULL;
    PyObject *found = NULL;
    Py_buffer view;
    if (!has_args("narrow", nargs, 3)) {
        return NULL;
    }
    int is_buffer = is_buffer_of_tokens(args[0], &view);
    if (!is_buffer && (tokens = tokens_of(args[0])) == NULL) {
        return NULL;
    }
    count = is_buffer ? view.len / (npy_intp)sizeof(npy_int64) : LENGTH(tokens);
    if ((stop = number(args[2], count, "stop")) >= 0 && (start = number(args[1], stop, "start")) >= 0) {
        found = narrowed((is_buffer ? (const npy_int64 *)view.buf : TOKENS(tokens)) + start, stop - start);
    }
    if (is_buffer) {
        PyBuffer_Release(&view);
    }
    Py_XDECREF(tokens);
    return found;
}

/* How many of the first `count` tokens of a run are equal; int32 ones are looked at a block at a time. */
static npy_intp equal_tokens(const char *run, int is_narrow, const npy_int64 *tokens, npy_intp count)
{
    const npy_int32 *narrow = (const npy_int32 *)run;
    const npy_int64 *wide = (const npy_int64 *)run;
    npy_intp at = 0;
    for (npy_int64 differ = 0; is_narrow && at + BLOCK <= count; at += BLOCK) {
        for (npy_intp i = at; i < at + BLOCK; i++) {
            differ |= narrow[i] ^ tokens[i];
        }
        if (differ) {
            break;
        }
    }
    while (at < count && (is_narrow ? narrow[at] : wide[at]) == tokens[at]) {
        at++;
    }
    return at;
}

static PyObject *num_equal(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    npy_intp width, start, stop, count = -1;
    PyArrayObject *tokens;
    if (!has_args("num_equal", nargs, 5) || (width = number(args[1], NPY_MAX_INT32, "width")) < 0) {
        return NULL;
    }
    if (!PyBytes_Check(args[0]) || (width != sizeof(npy_int32) && width != sizeof(npy_int64))) {
        return PyErr_Format(PyExc_TypeError, "no run of tokens of %zd bytes: %R", width, (PyObject *)Py_TYPE(args[0]));
    }
    if ((tokens = tokens_of(args[2])) == NULL) {
        return NULL;
    }
    if ((stop = number(args[4], LENGTH(tokens), "stop")) >= 0 && (start = number(args[3], stop, "start")) >= 0) {
        npy_intp length = PyBytes_GET_SIZE(args[0]) / width;
        count = stop - start < length ? stop - start : length;
        count = equal_tokens(PyBytes_AS_STRING(args[0]), width == sizeof(npy_int32), TOKENS(tokens) + start, count);
    }
    Py_DECREF(tokens);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static PyObject *untrack(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (PyObject_IS_GC(args[i]) && PyObject_GC_IsTracked(args[i])) {
            PyObject_GC_UnTrack(args[i]);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *track(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (PyObject_IS_GC(args[i]) && !PyObject_GC_IsTracked(args[i])) {
            PyObject_GC_Track(args[i]);
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copied", (PyCFunction)(void (*)(void))copied, METH_FASTCALL, NULL},
    {"claim", (PyCFunction)(void (*)(void))claim, METH_FASTCALL, NULL},
    {"joined", joined, METH_O, NULL},
    {"mark", (PyCFunction)(void (*)(void))mark, METH_FASTCALL, NULL},
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, NULL},
    {"give", (PyCFunction)(void (*)(void))give, METH_FASTCALL, NULL},
    {"slots_of", (PyCFunction)(void (*)(void))slots_of, METH_FASTCALL, NULL},
    {"pages_of", (PyCFunction)(void (*)(void))pages_of, METH_FASTCALL, NULL},
    {"pages_at", (PyCFunction)(void (*)(void))pages_at, METH_FASTCALL, NULL},
    {"narrow", (PyCFunction)(void (*)(void))narrow, METH_FASTCALL, NULL},
    {"num_equal", (PyCFunction)(void (*)(void))num_equal, METH_FASTCALL, NULL},
    {"track", (PyCFunction)(void (*)(void))track, METH_FASTCALL, NULL},
    {"untrack", (PyCFunction)(void (*)(void))untrack, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ids", NULL, -1, methods};

PyMODINIT_FUNC PyInit__ids(void)
{
    import_array();
    return PyModule_Create(&module);
}
