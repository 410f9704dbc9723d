#!/usr/bin/env python3
"""A second reader of vt bundles, written from SPEC.md alone: slow, short, standard library only.

    read_bundle.py BUNDLE                  check the bundle, list its tensors
    read_bundle.py BUNDLE --compare FILE   decode every tensor and compare its bits with an F32 safetensors
                                           file, such as `vt-bundle export --dequantize` writes

Hashes are checked where the package `blake3` is installed. Raw ggml blocks are listed, not decoded. Section numbers in
comments are those of SPEC.md.
"""

import argparse
import ctypes
import json
import math
import os
import struct
import sys

try:
    import blake3
except ImportError:
    blake3 = None

GIB = 1 << 30
DTYPES = {"bool": 1, "u8": 1, "i8": 1, "f8_e4m3": 1, "f8_e5m2": 1, "f8_e8m0": 1, "u16": 2, "i16": 2, "f16": 2,
          "bf16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "f64": 8}
SCALE_BYTES = {"e4m3": 1, "e8m0": 1, "u8": 1, "i8": 1, "f16": 2, "bf16": 2, "f32": 4}


class Invalid(Exception):
    """The bundle is not what SPEC.md allows."""


def need(condition, *what):
    if not condition:
        raise Invalid(" ".join(str(w) for w in what))


def f32(x):
    """x rounded to binary32: an operation on f32 operands, done in doubles and rounded once more, is exact f32."""
    return ctypes.c_float(x).value


# --- canonical JSON (section 2, RFC 8785) ---------------------------------------------------------------------------

def number(x):
    """A number as ECMAScript prints it."""
    if isinstance(x, int) and abs(x) < 1 << 53:
        return str(x)
    x = float(x)
    need(math.isfinite(x), "a number is not finite")
    if x == 0:
        return "0"
    mantissa, _, exponent = repr(abs(x)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        text = digits + "0" * (point - len(digits))
    elif 0 < point <= 21:
        text = digits[:point] + "." + digits[point:]
    elif -6 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        text = digits[0] + ("." + digits[1:] if digits[1:] else "") + "e%+d" % (point - 1)
    return ("-" if x < 0 else "") + text


def canonical(value):
    if isinstance(value, dict):
        keys = sorted(value, key=lambda k: k.encode("utf-16-be"))
        return "{" + ",".join(canonical(k) + ":" + canonical(value[k]) for k in keys) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return number(value)


# --- numbers (section 6) --------------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
DOUBLED = [2 * v for v in E2M1[:8]] + [0.0] + [2 * v for v in E2M1[9:]]
KVALUES = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def e4m3(b):
    sign, exponent, mantissa = -1.0 if b >> 7 else 1.0, b >> 3 & 15, b & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** -9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e8m0(b):
    return math.nan if b == 255 else 2.0 ** (b - 127)


def ue4m3(b):
    return 0.0 if b == 0x7F else abs(e4m3(b & 0x7F)) if b & 0x7F != 0x7F else 480.0


def half(raw):
    return struct.unpack("<e", raw)[0]


def scale_value(dtype, raw):
    return {"e4m3": lambda: e4m3(raw[0]), "e8m0": lambda: e8m0(raw[0]), "u8": lambda: raw[0],
            "i8": lambda: struct.unpack("b", raw)[0], "f16": lambda: half(raw),
            "bf16": lambda: struct.unpack("<f", b"\0\0" + raw)[0], "f32": lambda: struct.unpack("<f", raw)[0]}[dtype]()


# decode -> encoding, code planes (name, bits, shift), scale planes (name, type, span), value of a code given its scales
Q4, Q8, Q2 = ("q4", 4, 0), ("q8", 8, 0), ("q2", 2, 0)
D, M = ("d", "f16", "group"), ("m", "f16", "group")
SUPER_D, SUPER_DMIN = ("d", "f16", 256), ("dmin", "f16", 256)
SC, MN = ("sc", "u8", "group"), ("mn", "u8", "group")


def k_affine(c, s):
    return f32(f32(f32(s["d"] * s["sc"]) * c) - f32(s["dmin"] * s["mn"]))


ENCODINGS = {
    "nvfp4.modelopt@1": ("e2m1", [Q4], [("scales", "e4m3", "group"), ("global", "f32", "part")],
                         lambda c, s: f32(E2M1[c] * f32(s["scales"] * s["global"]))),
    "nvfp4.compressed-tensors@1": ("e2m1", [Q4], [("scales", "e4m3", "group"), ("global", "f32", "part")],
                                   lambda c, s: f32(E2M1[c] * f32(s["scales"] / s["global"]))),
    "mxfp4@1": ("e2m1", [Q4], [("scales", "e8m0", "group")], lambda c, s: f32(E2M1[c] * s["scales"])),
    "mxfp8@1": ("e4m3", [Q8], [("scales", "e8m0", "group")], lambda c, s: f32(e4m3(c) * s["scales"])),
    "q4_0.ggml@1": ("q4_0", [Q4], [D], lambda c, s: f32((c - 8) * s["d"])),
    "q4_1.ggml@1": ("q4_1", [Q4], [D, M], lambda c, s: f32(f32(c * s["d"]) + s["m"])),
    "q5_0.ggml@1": ("q5_0", [Q4, ("h1", 1, 4)], [D], lambda c, s: f32((c - 16) * s["d"])),
    "q5_1.ggml@1": ("q5_1", [Q4, ("h1", 1, 4)], [D, M], lambda c, s: f32(f32(c * s["d"]) + s["m"])),
    "q8_0.ggml@1": ("q8_0", [Q8], [D], lambda c, s: f32((c - 128) * s["d"])),
    "q2_k.ggml@1": ("q2_k", [Q2], [("scmn", "u8", "group"), SUPER_D, SUPER_DMIN],
                    lambda c, s: f32(f32(f32(s["d"] * (s["scmn"] % 16)) * c) - f32(s["dmin"] * (s["scmn"] // 16)))),
    "q3_k.ggml@1": ("q3_k", [Q2, ("h1", 1, 2)], [SC, SUPER_D],
                    lambda c, s: f32(f32(s["d"] * (s["sc"] - 32)) * (c - 4))),
    "q4_k.ggml@1": ("q4_k", [Q4], [SC, MN, SUPER_D, SUPER_DMIN], k_affine),
    "q5_k.ggml@1": ("q5_k", [Q4, ("h1", 1, 4)], [SC, MN, SUPER_D, SUPER_DMIN], k_affine),
    "q6_k.ggml@1": ("q6_k", [Q4, ("h2", 2, 4)], [("sc", "i8", "group"), SUPER_D],
                    lambda c, s: f32(f32(s["d"] * s["sc"]) * (c - 32))),
    "iq4_nl.ggml@1": ("iq4_nl", [Q4], [D], lambda c, s: f32(s["d"] * KVALUES[c])),
    "iq4_xs.ggml@1": ("iq4_xs", [Q4], [SC, SUPER_D],
                      lambda c, s: f32(f32(s["d"] * (s["sc"] - 32)) * KVALUES[c])),
    "mxfp4.ggml@1": ("e2m1", [Q4], [("scales", "e8m0", "group")],
                     # 2^(e - 128) with e = 255 finite: half of an e8m0 that has no NaN.
                     lambda c, s: f32(DOUBLED[c] * (2.0 ** 127 if math.isnan(s["scales"]) else s["scales"] / 2))),
    "nvfp4.ggml@1": ("e2m1", [Q4], [("scales", "u8", "group")],
                     lambda c, s: f32(DOUBLED[c] * (ue4m3(s["scales"]) / 2))),
}
for T in ("f32", "bf16", "f16", "e8m0"):
    for kind, span in (("tensor", "part"), ("channel", "channel"), ("block", "block")):
        ENCODINGS[f"fp8.{kind}.{T}@1"] = ("e4m3", [Q8], [("scales", T, span)], lambda c, s: f32(e4m3(c) * s["scales"]))
    for bits, plane, zero in ((4, Q4, 8), (8, Q8, 128)):
        scales, zeros = ("scales", T, "group"), ("zeros", "u8", "group")
        fixed = lambda c, s, zero=zero: f32((c - zero) * s["scales"])
        ENCODINGS[f"int{bits}.symmetric.{T}@1"] = (f"u{bits}b{zero}", [plane], [scales], fixed)
        ENCODINGS[f"int{bits}.symmetric.tensor.{T}@1"] = (f"u{bits}b{zero}", [plane], [("scales", T, "part")], fixed)
        ENCODINGS[f"int{bits}.zeros.{T}@1"] = (
            f"u{bits}", [plane], [scales, zeros], lambda c, s: f32((c - s["zeros"]) * s["scales"]))
        ENCODINGS[f"int{bits}.zeros-minus-one.{T}@1"] = (
            f"u{bits}", [plane], [scales, zeros], lambda c, s: f32((c - (s["zeros"] + 1)) * s["scales"]))


# --- the tile layout (section 4) ------------------------------------------------------------------------------------

def up(x, unit):
    return -(-x // unit) * unit


def slot(r, c, bits):
    lane, j, half8, odd, high = 4 * (c % 8) + r % 8 // 2, c // 16, c // 8 % 2, r % 2, r // 8
    return 32 * lane + 8 * j + (4 * half8 + high + 2 * odd if bits == 8 else high + 2 * half8 + 4 * odd)


SLOTS = {bits: [[slot(r, c, bits) for r in range(16)] for c in range(64)] for bits in (1, 2, 4, 8)}


def position(n, size):
    c = n % 64
    g = 8 * (c % 8) + c // 8
    if size == 1:
        g += {1: 1, 2: -1}.get(g % 4, 0)
    return n - c + g


class Tiled:
    """A tensor of layout marlin-16x64@1."""

    def __init__(self, tensor, plane):
        layout = tensor["layout"]
        need(tensor["decode"] in ENCODINGS, "decode", tensor["decode"], "is unknown to this reader")
        encoding, self.codes, self.scales, self.formula = ENCODINGS[tensor["decode"]]
        need(layout["encoding"] == encoding, "encoding", layout["encoding"], "does not belong to", tensor["decode"])
        (self.n, self.k), self.parts = tensor["shape"], tensor["parts"]
        self.group, self.block = layout.get("group_size"), layout.get("block")
        start = 0
        for part in self.parts:
            need(part["row_start"] == start, part["name"], "starts at row", part["row_start"], "not", start)
            start += up(part["rows"], 64)
        self.width, self.depth = start, up(self.k, 16)
        need(layout["padded_shape"] == [self.width, self.depth], "padded_shape is", layout["padded_shape"])
        self.plane = plane
        sizes = [(name, self.depth * self.width * bits // 8) for name, bits, _ in self.codes]
        sizes += [(name, self.elements(span) * SCALE_BYTES[dtype]) for name, dtype, span in self.scales]
        need(sizes == [(p["name"], p["size"]) for p in tensor["planes"]], "planes should be", sizes)

    def block_rows(self, part):
        return -(-part["rows"] // self.block[0])

    def elements(self, span):
        if span == "part":
            return len(self.parts)
        if span == "channel":
            return self.width
        if span == "block":
            return sum(map(self.block_rows, self.parts)) * -(-self.k // self.block[1])
        return -(-self.k // (self.group if span == "group" else span)) * self.width

    def scale_index(self, span, size, part, row, k):
        n = self.parts[part]["row_start"] + row
        if span == "part":
            return part
        if span == "channel":
            return n
        if span == "block":
            above = sum(map(self.block_rows, self.parts[:part]))
            return (above + row // self.block[0]) * -(-self.k // self.block[1]) + k // self.block[1]
        return k // (self.group if span == "group" else span) * self.width + position(n, size)

    def row(self, part, row):
        """The values of one row of a part."""
        n = self.parts[part]["row_start"] + row
        codes = [0] * self.k
        for name, bits, shift in self.codes:
            data, slots, mask = self.plane(name), SLOTS[bits][n % 64], (1 << bits) - 1
            for k in range(self.k):
                tile = k // 16 * (self.width // 64) + n // 64
                bit = tile * 1024 * bits + slots[k % 16] * bits
                codes[k] |= (data[bit // 8] >> bit % 8 & mask) << shift
        # A step along K within which no scale changes.
        step = {"group": self.group, "block": self.block and self.block[1], "part": self.k, "channel": self.k}
        step = math.gcd(*(step.get(span, span) for _, _, span in self.scales), self.k)
        values = []
        for k in range(0, self.k, step):
            s = {}
            for name, dtype, span in self.scales:
                size = SCALE_BYTES[dtype]
                at = self.scale_index(span, size, part, row, k) * size
                s[name] = scale_value(dtype, self.plane(name)[at:at + size])
            known = {}
            for code in codes[k:k + step]:
                if code not in known:
                    known[code] = self.formula(code, s)
                values.append(known[code])
        return values


# --- the bundle -----------------------------------------------------------------------------------------------------

def b3(data):
    return blake3.blake3(data).hexdigest()


class Bundle:
    """An opened bundle: manifest checked; hashes checked where blake3 is installed."""

    def __init__(self, folder):
        self.folder = folder
        raw = self.read("manifest.json")
        m = self.manifest = json.loads(raw)
        need(m["format"] == "vt-bundle" and m["format_version"] == 1, "format", m["format"], m["format_version"])
        need(canonical(m).encode() == raw, "manifest.json is not canonical")
        self.id = self.read("bundle.id").decode()
        need(len(self.id) == 65 and self.id.endswith("\n"), "bundle.id is malformed")
        self.id = self.id.strip()
        need(blake3 is None or b3(raw) == self.id, "bundle.id is not the hash of the manifest")
        seen = set()
        for entry in m["assets"] + self.segments("image") + self.segments("cold"):
            name = entry["file"]
            need(name not in seen and all(c not in ("", ".", "..") for c in name.split("/")), "file name", name)
            seen.add(name)
            data = self.read(name)
            need(len(data) == entry["size"], name, "has", len(data), "bytes, not", entry["size"])
            need(blake3 is None or b3(data) == entry["blake3"], name, "has another hash")
        self.spaces = {}
        for space in ("image", "cold"):
            segments = self.segments(space)
            need(all(s["size"] == GIB for s in segments[:-1]), "a segment before the last is not 1 GiB")
            self.spaces[space] = b"".join(self.read(s["file"]) for s in segments)
        self.padding()

    def segments(self, space):
        return self.manifest.get(space, {}).get("segments", [])

    def read(self, name):
        with open(os.path.join(self.folder, *name.split("/")), "rb") as file:
            return file.read()

    def plane_start(self, tensor, plane, expert):
        experts = tensor.get("experts")
        if not experts:
            return plane["offset"]
        if "stride" in experts:
            return plane["offset"] + expert * experts["stride"]
        return plane["offset"] - experts["record_offset"] + experts["offsets"][expert]

    def padding(self):
        """Planes are aligned, inside and apart; what lies between them is zero (section 3)."""
        for space, data in self.spaces.items():
            ranges = []
            for t in self.manifest["tensors"]:
                for expert in range(t.get("experts", {}).get("count", 1) if t["placement"] == space else 0):
                    for p in t["planes"]:
                        at = self.plane_start(t, p, expert)
                        need(at % 256 == 0 and at + p["size"] <= len(data), t["name"], p["name"], "at", at)
                        ranges.append((at, at + p["size"]))
            end = 0
            for start, stop in sorted(ranges) + [(len(data), len(data))]:
                need(start >= end or start == stop, "planes overlap at", start, "in", space)
                need(not any(data[end:start]), "padding between", end, "and", start, "is not zero")
                end = max(end, stop)

    def tensors(self):
        """(name, dtype, shape, rows of raw little-endian bytes) of every part and expert, decoded to F32."""
        for t in self.manifest["tensors"]:
            for expert in range(t.get("experts", {}).get("count", 1)):
                def plane(name, t=t, expert=expert):
                    p = next(p for p in t["planes"] if p["name"] == name)
                    at = self.plane_start(t, p, expert)
                    return memoryview(self.spaces[t["placement"]])[at:at + p["size"]]

                for index, part in enumerate(t["parts"]):
                    name = part["name"].replace("{expert}", str(expert)) if "experts" in t else part["name"]
                    shape = ([part["rows"]] + t["shape"][1:]) if t["shape"] else []
                    yield (name, part, *self.part(t, plane, index), shape)

    def part(self, t, plane, index):
        layout, part = t["layout"], t["parts"][index]
        if layout["id"] == "marlin-16x64@1":
            tiled = Tiled(t, plane)
            return "F32", (struct.pack("<%df" % tiled.k, *tiled.row(index, r)) for r in range(part["rows"]))
        if layout["id"] == "row-major@1":
            dtype = layout["dtype"]
            need(t["decode"] == f"plain.{dtype}@1", "decode", t["decode"], "of", dtype)
            size = DTYPES[dtype] * math.prod(t["shape"][1:])
            data = plane("data")[part["row_start"] * size:(part["row_start"] + part["rows"]) * size]
            wide = {"bf16": lambda d: b"".join(b"\0\0" + d[i:i + 2] for i in range(0, len(d), 2)),
                    "f16": lambda d: struct.pack("<%df" % (len(d) // 2), *struct.unpack("<%de" % (len(d) // 2), d)),
                    "f8_e4m3": lambda d: struct.pack("<%df" % len(d), *map(e4m3, d)),
                    "f8_e8m0": lambda d: struct.pack("<%df" % len(d), *map(e8m0, d)),
                    "f32": bytes}.get(dtype)
            return ("F32", [wide(bytes(data))]) if wide else (dtype.upper(), [bytes(data)])
        return None, []


def folded(rows, scale):
    """Rows of f32 with each column multiplied by the scale of its input."""
    for row in rows:
        values = struct.unpack("<%df" % len(scale), row)
        yield struct.pack("<%df" % len(scale), *(f32(v * s) for v, s in zip(values, scale)))


def compare(bundle, path):
    """Compares decoded tensors with a safetensors file; returns the number of equal tensors."""
    with open(path, "rb") as file:
        data = file.read()
    header_len = struct.unpack("<Q", data[:8])[0]
    header, start = json.loads(data[8:8 + header_len]), 8 + header_len
    header.pop("__metadata__", None)
    plain = {name: rows for name, _, dtype, rows, _ in bundle.tensors() if dtype == "F32" and isinstance(rows, list)}
    kept = {part.get("pre_quant_scale") for _, part, *_ in bundle.tensors() if "low_rank" in part}
    scales = {part.get("pre_quant_scale") for _, part, *_ in bundle.tensors()} - kept - {None}
    equal = 0
    for name, part, dtype, rows, shape in bundle.tensors():
        if dtype is None or name in scales:
            if dtype is None:
                print("not decoded:", name)
                header.pop(name, None)
            continue
        need(name in header, name, "is not in", path)
        entry = header.pop(name)
        need((entry["dtype"], entry["shape"]) == (dtype, shape), name, "is", entry, "expected", dtype, shape)
        if "pre_quant_scale" in part:
            raw = plain[part["pre_quant_scale"]][0]
            rows = folded(rows, struct.unpack("<%df" % (len(raw) // 4), raw))
        begin, end = entry["data_offsets"]
        need(b"".join(rows) == data[start + begin:start + end], name, "differs")
        equal += 1
    need(not header, "the file has more tensors:", *header)
    return equal


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--compare", metavar="FILE")
    args = parser.parse_args()
    try:
        bundle = Bundle(args.bundle)
        if blake3 is None:
            print("note: the package blake3 is not installed, hashes are not checked", file=sys.stderr)
        print(bundle.id)
        if args.compare:
            print(compare(bundle, args.compare), "tensors equal, bit for bit")
        else:
            for t in bundle.manifest["tensors"]:
                print(t["name"], t["shape"], t["layout"]["id"], t["decode"])
    except (Invalid, OSError, KeyError, ValueError) as error:
        print("error:", error, file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
