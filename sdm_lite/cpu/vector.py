"""A SIMD vector as a Numba value: the vocabulary in which the delta kernels are written.

A `Vector(dtype, lanes)` lives in registers; LLVM cuts it into the machine's own width, so the same kernel
serves AVX2, AVX-512 and NEON. Every operation is exact and ordered: `fma` rounds once, `total` adds halves in
a fixed tree, nothing is reassociated, so results do not depend on the machine's vector width.

Memory operations address a C-contiguous 2-D array by (row, column). Their last argument is the number of
columns that exist: None means all lanes, an integer masks the rest (a tail), chosen when compiling by its type.
An array of 16-bit floats (the bits of bf16 as uint16, of fp16 as int16: Numba has neither) is loaded as float32; what
is stored there must be rounded already.
`zero` arguments only say which vector type is meant.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

CACHE_LINE = 64  # bytes


class Vector(types.Type):
    """The Numba type of `lanes` numbers of `dtype` in registers."""

    def __init__(self, dtype: types.Number, lanes: int):
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        scalar = manager.lookup(vector.dtype).get_value_type()
        super().__init__(manager, vector, ir.VectorType(scalar, vector.lanes))


_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _splat(builder, scalar, lanes):
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _address(context, builder, array_type, array, row, column, element):
    """Return a pointer to array[row, column] as `element`; 64-bit arithmetic."""
    struct = context.make_array(array_type)(context, builder, array)
    stride = cgutils.unpack_tuple(builder, struct.strides, 2)[0]
    item = ir.Constant(_I64, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
    offset = builder.add(builder.mul(row, stride), builder.mul(column, item))
    base = builder.bitcast(struct.data, ir.IntType(8).as_pointer())
    return builder.bitcast(builder.gep(base, [offset]), element.as_pointer())


def _mask(builder, count, lanes):
    numbers = ir.Constant(ir.VectorType(_I64, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, _splat(builder, count, lanes))


def _stored(context, array, lanes):
    """Return the LLVM type of `lanes` numbers as the array has them; 16-bit ones as their bits."""
    if array.dtype.bitwidth == 16:
        return ir.VectorType(ir.IntType(16), lanes)
    return ir.VectorType(context.get_value_type(array.dtype), lanes)


def _letter(array):
    return "i" if array.dtype.bitwidth == 16 else "f"


def _widened(context, builder, array, value, zero):
    """Return loaded numbers in the vector's dtype."""
    if array.dtype.bitwidth != 16:
        return value
    if array.dtype == types.int16:
        half = builder.bitcast(value, ir.VectorType(ir.HalfType(), zero.lanes))
        return builder.fpext(half, context.get_value_type(zero))
    bits = builder.zext(value, ir.VectorType(_I32, zero.lanes))
    bits = builder.shl(bits, ir.Constant(bits.type, [16] * zero.lanes))
    return builder.bitcast(bits, context.get_value_type(zero))


def _narrowed(context, builder, array, value, vector):
    """Return numbers that the array's dtype holds exactly, as the array stores them."""
    if array.dtype.bitwidth != 16:
        return value
    bits = _stored(context, array, vector.lanes)
    if array.dtype == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(ir.HalfType(), vector.lanes)), bits)
    words = builder.bitcast(value, ir.VectorType(_I32, vector.lanes))
    return builder.trunc(builder.lshr(words, ir.Constant(words.type, [16] * vector.lanes)), bits)


def _suffix(vector):
    return f"v{vector.lanes}f{vector.dtype.bitwidth}"


def _function(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def borrowed(typingctx, array):
    """Return the array without its reference count: it must be kept alive by its owner.

    Numba counts references atomically at every use of an array in a loop, on a cache line that all threads share.
    """

    def codegen(context, builder, signature, arguments):
        struct = context.make_array(array)(context, builder, arguments[0])
        struct.meminfo = ir.Constant(struct.meminfo.type, None)
        struct.parent = ir.Constant(struct.parent.type, None)
        return struct._getvalue()

    return array(array), codegen


@intrinsic
def zeros(typingctx, dtype, lanes):
    """Return a vector of `lanes` (a literal) zeros of the dtype given."""
    if not isinstance(lanes, types.IntegerLiteral):
        return None
    vector = Vector(dtype.dtype, lanes.literal_value)

    def codegen(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(vector), None)

    return vector(dtype, lanes), codegen


@intrinsic
def load(typingctx, array, row, column, zero, count):
    """Return array[row, column : column + lanes]; lanes past `count` are zero."""
    alignment = array.dtype.bitwidth // 8
    masked = not isinstance(count, types.NoneType)

    def codegen(context, builder, signature, arguments):
        vector = _stored(context, array, zero.lanes)
        pointer = _address(context, builder, array, *arguments[:3], vector)
        if masked:
            mask = _mask(builder, arguments[4], zero.lanes)
            name = f"llvm.masked.load.v{zero.lanes}{_letter(array)}{array.dtype.bitwidth}.p0"
            function = _function(builder, name, vector, [pointer.type, _I32, mask.type, vector])
            value = builder.call(function, [pointer, _I32(alignment), mask, ir.Constant(vector, None)])
        else:
            value = builder.load(pointer, align=alignment)
        return _widened(context, builder, array, value, zero)

    return zero(array, types.int64, types.int64, zero, types.int64 if masked else count), codegen


@intrinsic
def store(typingctx, array, row, column, value, count):
    """Set array[row, column : column + lanes] = value; columns past `count` stay as they are."""
    alignment = array.dtype.bitwidth // 8
    masked = not isinstance(count, types.NoneType)

    def codegen(context, builder, signature, arguments):
        vector = _stored(context, array, value.lanes)
        pointer = _address(context, builder, array, *arguments[:3], vector)
        narrow = _narrowed(context, builder, array, arguments[3], value)
        if not masked:
            builder.store(narrow, pointer, align=alignment)
        else:
            mask = _mask(builder, arguments[4], value.lanes)
            name = f"llvm.masked.store.v{value.lanes}{_letter(array)}{array.dtype.bitwidth}.p0"
            function = _function(builder, name, ir.VoidType(), [vector, pointer.type, _I32, mask.type])
            builder.call(function, [narrow, pointer, _I32(alignment), mask])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, value, types.int64 if masked else count), codegen


@intrinsic
def prefetch(typingctx, array, row, column, zero):
    """Ask the cache for array[row, column : column + lanes]; never faults, changes no result."""

    def codegen(context, builder, signature, arguments):
        byte = ir.IntType(8)
        pointer = _address(context, builder, array, *arguments[:3], byte)
        function = _function(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        for offset in range(0, zero.lanes * array.dtype.bitwidth // 8, CACHE_LINE):
            builder.call(function, [builder.gep(pointer, [_I64(offset)]), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, zero), codegen


@intrinsic
def splat(typingctx, scalar, zero):
    """Return a vector of copies of a scalar."""

    def codegen(context, builder, signature, arguments):
        return _splat(builder, arguments[0], zero.lanes)

    return zero(zero.dtype, zero), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """Return a * b + c, rounded once."""

    def codegen(context, builder, signature, arguments):
        kind = arguments[0].type
        return builder.call(_function(builder, f"llvm.fma.{_suffix(a)}", kind, [kind] * 3), arguments)

    return a(a, a, a), codegen


def _binary(name, doc):
    def typed(typingctx, a, b):
        def codegen(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments)

        return a(a, a), codegen

    typed.__name__, typed.__doc__ = name, doc
    return intrinsic(typed)


add = _binary("fadd", "Return a + b.")
sub = _binary("fsub", "Return a - b.")
mul = _binary("fmul", "Return a * b.")


@intrinsic
def greater(typingctx, a, b):
    """Return the greater of each two lanes; b's where one is NaN."""

    def codegen(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, a), codegen


@intrinsic
def lanes_from(typingctx, a, least):
    """Return an integer whose bit i says that lane i is >= least (a scalar)."""

    def codegen(context, builder, signature, arguments):
        wanted = builder.fcmp_ordered(">=", arguments[0], _splat(builder, arguments[1], a.lanes))
        return builder.zext(builder.bitcast(wanted, ir.IntType(a.lanes)), _I64)

    return types.uint64(a, a.dtype), codegen


@intrinsic
def lowest_bit(typingctx, mask):
    """Return the place of the lowest bit that is set, of a mask that has one."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def dot_pairs(typingctx, a, b, c):
    """Return c + the dot products of each lane's two 16-bit halves, all integers; a single instruction on x86."""

    def codegen(context, builder, signature, arguments):
        halves, wide = ir.VectorType(ir.IntType(16), 2 * a.lanes), ir.VectorType(_I32, 2 * a.lanes)
        x, y = (builder.sext(builder.bitcast(v, halves), wide) for v in arguments[:2])
        products = builder.mul(x, y)
        choices = [ir.Constant(ir.VectorType(_I32, a.lanes), list(range(at, 2 * a.lanes, 2))) for at in (0, 1)]
        low, high = (builder.shuffle_vector(products, products, choice) for choice in choices)
        return builder.add(arguments[2], builder.add(low, high))

    return a(a, a, a), codegen


@intrinsic
def to_floats(typingctx, a, zero):
    """Return integers as the floats nearest to them."""

    def codegen(context, builder, signature, arguments):
        return builder.sitofp(arguments[0], context.get_value_type(zero))

    return zero(a, zero), codegen


@intrinsic
def store_rounded(typingctx, array, row, column, value):
    """Set array[row, column : column + lanes], int16, to the integers nearest to a vector that int16 holds."""

    def codegen(context, builder, signature, arguments):
        x = arguments[3]
        nearest = builder.call(_function(builder, f"llvm.rint.{_suffix(value)}", x.type, [x.type]), [x])
        words = ir.VectorType(ir.IntType(16), value.lanes)
        pointer = _address(context, builder, array, *arguments[:3], words)
        builder.store(builder.trunc(builder.fptosi(nearest, ir.VectorType(_I32, value.lanes)), words), pointer, align=2)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, value), codegen


@intrinsic
def total(typingctx, a):
    """Return the sum of the lanes, adding the upper half to the lower until one is left."""

    def codegen(context, builder, signature, arguments):
        value, lanes = arguments[0], a.lanes
        while lanes > 1:
            lanes //= 2
            halves = [ir.Constant(ir.VectorType(_I32, lanes), list(range(at, at + lanes))) for at in (0, lanes)]
            lower, upper = (builder.shuffle_vector(value, value, half) for half in halves)
            value = builder.fadd(lower, upper)
        return builder.extract_element(value, _I32(0))

    return a.dtype(a), codegen


@intrinsic
def round_bf16(typingctx, a):
    """Return a vector (float32; others as they are) rounded to the nearest bf16 number, ties to even; NaN stays NaN."""

    def codegen(context, builder, signature, arguments):
        return _round_bits(builder, arguments[0], a.lanes, 16) if a.dtype == types.float32 else arguments[0]

    return a(a), codegen


@intrinsic
def round_fp16(typingctx, a):
    """Return a vector (float32; others as they are) rounded to the nearest fp16; past its range: infinity."""

    def codegen(context, builder, signature, arguments):
        x, lanes = arguments[0], a.lanes
        if a.dtype != types.float32:
            return x
        integers = ir.VectorType(_I32, lanes)
        bits = builder.bitcast(x, integers)
        sign = builder.and_(bits, ir.Constant(integers, [0x80000000] * lanes))
        size = builder.bitcast(builder.xor(bits, sign), x.type)

        def floats(value):
            return ir.Constant(x.type, [value] * lanes)

        normal = _round_bits(builder, size, lanes, 13)
        # float32 numbers in [0.5, 1) are 2^-24 apart, which is the spacing of the fp16 subnormals
        small = builder.fsub(builder.fadd(size, floats(0.5)), floats(0.5))
        rounded = builder.select(builder.fcmp_ordered("<", size, floats(2.0**-14)), small, normal)
        finite = builder.fcmp_unordered("<", size, floats(65520.0))  # true for NaN, which _round_bits has kept
        rounded = builder.select(finite, rounded, floats(float("inf")))
        return builder.bitcast(builder.or_(builder.bitcast(rounded, integers), sign), x.type)

    return a(a), codegen


def _round_bits(builder, x, lanes, dropped):
    """Round float32 lanes to nearest even after dropping the last `dropped` bits; NaN is kept."""
    integers = ir.VectorType(_I32, lanes)

    def ints(value):
        return ir.Constant(integers, [value] * lanes)

    bits = builder.bitcast(x, integers)
    odd = builder.and_(builder.lshr(bits, ints(dropped)), ints(1))
    bits = builder.add(bits, builder.add(odd, ints((1 << (dropped - 1)) - 1)))
    rounded = builder.bitcast(builder.and_(bits, ints(0xFFFFFFFF ^ ((1 << dropped) - 1))), x.type)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, rounded)
