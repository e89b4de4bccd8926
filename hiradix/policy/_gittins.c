/* What keeping data is worth, by its chance to be used next: gittins.py says what this does, and gittins_numpy.py, which it is
 * tested against, gives the same to the last bit. For that no product and sum become one operation: see setup.py. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#define BUCKETS 64

static int is_table(PyObject *object, int num_dims)
{
    PyArrayObject *array = (PyArrayObject *)object;
    return PyArray_Check(object) && PyArray_TYPE(array) == NPY_DOUBLE && PyArray_ISNOTSWAPPED(array)
        && PyArray_NDIM(array) == num_dims && PyArray_DIM(array, num_dims - 1) == BUCKETS;
}

/* The index of one class. All that begin `ahead` buckets before one are looked at together. */
static void row_index(const double *restrict hazard, const double *restrict widths, double *restrict best)
{
    double survival[BUCKETS], residence[BUCKETS], alive[BUCKETS], hits[BUCKETS], tokens[BUCKETS];
    for (int b = 0; b < BUCKETS; b++) {
        survival[b] = 1 - hazard[b];
        residence[b] = 1 - hazard[b] / 2;
        alive[b] = 1;
        hits[b] = tokens[b] = best[b] = 0;
    }
    for (int ahead = 0; ahead < BUCKETS; ahead++) {
        for (int b = 0; b < BUCKETS - ahead; b++) {
            hits[b] += alive[b] * hazard[b + ahead];
            tokens[b] += alive[b] * residence[b + ahead] * widths[b + ahead];
            alive[b] *= survival[b + ahead];
            double rate = hits[b] / tokens[b];
            best[b] = rate > best[b] || rate != rate ? rate : best[b];
        }
    }
}

static void row_falls(const double *index, double *least, npy_int64 *falls)
{
    least[0] = index[0];
    for (int b = 1; b < BUCKETS; b++) {
        least[b] = index[b] < least[b - 1] || index[b] != index[b] ? index[b] : least[b - 1];
    }
    falls[BUCKETS - 1] = BUCKETS;
    for (int b = BUCKETS - 2; b >= 0; b--) {
        falls[b] = least[b + 1] < least[b] ? b + 1 : falls[b + 1];
    }
}

static PyObject *index_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        return PyErr_Format(PyExc_TypeError, "index_of takes 2 arguments, not %zd", nargs);
    }
    if (!is_table(args[0], 2) || !is_table(args[1], 1)) {
        return PyErr_Format(PyExc_TypeError, "no float64 of %d age buckets", BUCKETS);
    }
    PyArrayObject *hazard = (PyArrayObject *)PyArray_FROM_OTF(args[0], NPY_DOUBLE, NPY_ARRAY_IN_ARRAY);
    PyArrayObject *widths = (PyArrayObject *)PyArray_FROM_OTF(args[1], NPY_DOUBLE, NPY_ARRAY_IN_ARRAY);
    PyArrayObject *index = NULL, *least = NULL, *falls = NULL;
    PyObject *found = NULL;
    if (hazard != NULL && widths != NULL) {
        index = (PyArrayObject *)PyArray_SimpleNew(2, PyArray_DIMS(hazard), NPY_DOUBLE);
        least = (PyArrayObject *)PyArray_SimpleNew(2, PyArray_DIMS(hazard), NPY_DOUBLE);
        falls = (PyArrayObject *)PyArray_SimpleNew(2, PyArray_DIMS(hazard), NPY_INT64);
    }
    if (index != NULL && least != NULL && falls != NULL) {
        for (npy_intp at = 0; at < PyArray_DIM(hazard, 0) * BUCKETS; at += BUCKETS) {
            double *row = (double *)PyArray_DATA(index) + at;
            row_index((const double *)PyArray_DATA(hazard) + at, (const double *)PyArray_DATA(widths), row);
            row_falls(row, (double *)PyArray_DATA(least) + at, (npy_int64 *)PyArray_DATA(falls) + at);
        }
        found = PyTuple_Pack(3, index, least, falls);
    }
    Py_XDECREF(hazard);
    Py_XDECREF(widths);
    Py_XDECREF(index);
    Py_XDECREF(least);
    Py_XDECREF(falls);
    return found;
}

static PyMethodDef methods[] = {
    {"index_of", (PyCFunction)(void (*)(void))index_of, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_gittins", NULL, -1, methods};

PyMODINIT_FUNC PyInit__gittins(void)
{
    import_array();
    return PyModule_Create(&module);
}
