/* What keeping data is worth, by its chance to be used next: gittins.py says what this does, and gittins_numpy.py, which it is
 * tested against, gives the same to the last bit. For that no product and sum become one operation: see setup.py. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <string.h>

#define BUCKETS 64
#define FAMILIES 3
#define PRIOR_REUSE 0.3
#define FAMILY_VOTES 10.0
#define REUSE_VOTES 6.0
#define SHAPE_VOTES 32.0
#define NEAR_SHAPE_VOTES 8.0
#define MAX_HAZARD 0.999
#define MAX_REUSE 0.995
#define ROUNDED 1e-9 /* below, 1 less what does not come back has lost its digits */
#define LEAST 1e-300 /* and nothing does */

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

/* The sum of a row, in numpy's order. */
static double sum_of(const double *row)
{
    double r[8];
    memcpy(r, row, sizeof(r));
    for (int b = 8; b < BUCKETS; b++) {
        r[b % 8] += row[b];
    }
    return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

static double least_of(double one, double other)
{
    return one < other ? one : other;
}

/* Of what comes back, the share that does in each bucket; how much does. */
static double think_times(const double *hazard, double *density)
{
    double alive = 1;
    for (int b = 0; b < BUCKETS; b++) {
        density[b] = alive * hazard[b];
        alive *= 1 - hazard[b];
    }
    double reuse = 1 - alive;
    if (reuse < ROUNDED) {
        reuse = sum_of(density);
        reuse = reuse > LEAST ? reuse : LEAST;
    }
    for (int b = 0; b < BUCKETS; b++) {
        density[b] /= reuse;
    }
    return reuse;
}

static void family_hazard(const double *used, const double *exposed, double *hazard)
{
    for (int b = 0; b < BUCKETS; b++) {
        double prior = PRIOR_REUSE / BUCKETS / (1 - PRIOR_REUSE / BUCKETS * b);
        hazard[b] = least_of((used[b] + FAMILY_VOTES * prior) / (exposed[b] + FAMILY_VOTES), MAX_HAZARD);
    }
}

/* The hazard of a class below, from its parent's reuse and the think times whose curve it borrows; its reuse. */
static double class_hazard(const double *votes, double parent, const double *density, double shape_votes, double *hazard)
{
    const double *used = votes, *exposed = votes + BUCKETS, *started = votes + 2 * BUCKETS;
    double weighted[BUCKETS], sum = 0;
    for (int b = 0; b < BUCKETS; b++) {
        weighted[b] = started[b] * density[b];
    }
    double seen = sum_of(used), all = sum_of(weighted);
    double reuse = least_of((seen + REUSE_VOTES * parent) / ((all > seen ? all : seen) + REUSE_VOTES), MAX_REUSE);
    for (int b = 0; b < BUCKETS; b++) {
        sum = b ? sum + density[b] : density[b];
        double expected = reuse * density[b] / (1 - reuse * (sum - density[b]));
        hazard[b] = least_of((used[b] + shape_votes * expected) / (exposed[b] + shape_votes), MAX_HAZARD);
    }
    return reuse;
}

/* Add each class's votes to its parent's, the deepest first; and have none used more often than it could be. */
static void add_up(double *votes, const npy_int64 *parents, const npy_int64 *levels, npy_intp count, npy_int64 deepest)
{
    for (npy_int64 level = deepest; level > 0; level--) {
        for (npy_intp c = 0; c < count; c++) {
            for (int i = 0; levels[c] == level && i < 3 * BUCKETS; i++) {
                votes[parents[c] * 3 * BUCKETS + i] += votes[c * 3 * BUCKETS + i];
            }
        }
    }
    for (int i = 0; i < 3 * BUCKETS; i++) {
        votes[i] += votes[3 * BUCKETS + i] + votes[2 * 3 * BUCKETS + i];
    }
    for (npy_intp i = 0; i < count * 3 * BUCKETS; i++) {
        if (i / BUCKETS % 3 == 1 && votes[i] < votes[i - BUCKETS]) {
            votes[i] = votes[i - BUCKETS];
        }
    }
}

/* The deepest level; -1 and TypeError for what is no tree of classes with votes. */
static npy_int64 depth_of(PyObject *const *args)
{
    PyArrayObject *votes = (PyArrayObject *)args[0];
    npy_intp count = 0;
    npy_int64 deepest = 0;
    int good = PyArray_Check(args[0]) && PyArray_TYPE(votes) == NPY_DOUBLE && PyArray_NDIM(votes) == 3 && PyArray_ISCARRAY(votes)
        && PyArray_DIM(votes, 1) == 3 && PyArray_DIM(votes, 2) == BUCKETS && (count = PyArray_DIM(votes, 0)) >= FAMILIES;
    for (int i = 1; good && i < 4; i++) {
        PyArrayObject *array = (PyArrayObject *)args[i];
        good = PyArray_Check(args[i]) && PyArray_TYPE(array) == NPY_INT64 && PyArray_NDIM(array) == 1
            && PyArray_DIM(array, 0) == count && PyArray_ISCARRAY_RO(array);
    }
    for (npy_intp c = 0; good && c < count; c++) {
        npy_int64 parent = ((npy_int64 *)PyArray_DATA((PyArrayObject *)args[1]))[c];
        npy_int64 curve = ((npy_int64 *)PyArray_DATA((PyArrayObject *)args[2]))[c];
        const npy_int64 *levels = PyArray_DATA((PyArrayObject *)args[3]);
        npy_int64 level = levels[c];
        good = parent >= 0 && parent <= c && curve >= 0 && curve <= c && level >= 0 && level < BUCKETS
            && (level == 0) == (c < FAMILIES) && (level == 0 || (levels[parent] < level && levels[curve] < level));
        deepest = level > deepest ? level : deepest;
    }
    if (!good) {
        PyErr_Format(PyExc_TypeError, "no votes of classes in %d age buckets, with parents, curves and levels", BUCKETS);
    }
    return good ? deepest : -1;
}

static PyObject *hazard_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        return PyErr_Format(PyExc_TypeError, "hazard_of takes 4 arguments, not %zd", nargs);
    }
    npy_int64 deepest = depth_of(args);
    npy_intp shape[2] = {deepest < 0 ? 0 : PyArray_DIM((PyArrayObject *)args[0], 0), BUCKETS};
    PyObject *found = deepest < 0 ? NULL : PyArray_SimpleNew(2, shape, NPY_DOUBLE);
    double *reuse = found == NULL ? NULL : PyMem_Malloc(shape[0] * (1 + BUCKETS) * sizeof(double));
    if (reuse == NULL) {
        Py_XDECREF(found);
        return deepest < 0 ? NULL : PyErr_NoMemory();
    }
    double *votes = PyArray_DATA((PyArrayObject *)args[0]), *hazard = PyArray_DATA((PyArrayObject *)found);
    const npy_int64 *parents = PyArray_DATA((PyArrayObject *)args[1]), *curves = PyArray_DATA((PyArrayObject *)args[2]);
    const npy_int64 *levels = PyArray_DATA((PyArrayObject *)args[3]);
    double *density = reuse + shape[0];
    add_up(votes, parents, levels, shape[0], deepest);
    for (npy_int64 level = 0; level <= deepest; level++) {
        for (npy_intp c = 0; c < shape[0]; c++) {
            const double *own = votes + c * 3 * BUCKETS;
            double *its = hazard + c * BUCKETS, *times = density + c * BUCKETS;
            if (level == 0 && c < FAMILIES) {
                family_hazard(own, own + BUCKETS, its);
                reuse[c] = think_times(its, times);
            } else if (level && levels[c] == level) {
                double shape_votes = curves[c] < FAMILIES ? SHAPE_VOTES : NEAR_SHAPE_VOTES;
                reuse[c] = class_hazard(own, reuse[parents[c]], density + curves[c] * BUCKETS, shape_votes, its);
                think_times(its, times);
            }
        }
    }
    PyMem_Free(reuse);
    return found;
}

static PyMethodDef methods[] = {
    {"hazard_of", (PyCFunction)(void (*)(void))hazard_of, METH_FASTCALL, NULL},
    {"index_of", (PyCFunction)(void (*)(void))index_of, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_gittins", NULL, -1, methods};

PyMODINIT_FUNC PyInit__gittins(void)
{
    import_array();
    return PyModule_Create(&module);
}
