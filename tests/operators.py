"""A library with a custom operator for ONNX Runtime, built on the fly by the system's C compiler.

Lives here: the operator `Twice` of domain `test`, and a model that uses it. ONNX Runtime's wheel comes without headers:
the needed parts of its C interface, which only ever grows at the end, are spelled out by position.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
from onnx import helper

from tests import models

__all__ = ["build_library", "twice"]

_SOURCE = r"""
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

typedef void *(*function)();
struct base { function *(*api_of_version)(uint32_t); const char *(*version)(void); };
struct operator_ { uint32_t version; function calls[11]; };

enum { CREATE_DOMAIN = 26, ADD_OPERATOR = 27, ADD_DOMAIN = 28, DATA = 51, RANK = 61, DIMS = 62, COUNT = 64,
       SHAPE = 65, INPUT = 90, OUTPUT = 91, RELEASE_SHAPE = 99, FLOAT = 1, VERSION = 8 };

static function *api;

static void *create(void *op, void *given, void *info) { return op; }
static const char *name(void *op) { return "Twice"; }
static const char *provider(void *op) { return NULL; }
static int type(void *op, size_t index) { return FLOAT; }
static size_t one(void *op) { return 1; }
static void destroy(void *kernel) { }
static int required(void *op, size_t index) { return 0; }

static void compute(void *kernel, void *context) {
  void *input, *output, *shape;
  float *from, *to;
  size_t rank, count;
  int64_t dims[8];
  api[INPUT](context, (size_t)0, &input);
  api[SHAPE](input, &shape);
  api[RANK](shape, &rank);
  api[DIMS](shape, dims, rank);
  api[COUNT](shape, &count);
  api[RELEASE_SHAPE](shape);
  if (count < LEAST) raise(SIGFPE);
  while (count == ENDLESS) pause();
  if (WAIT_US) usleep(WAIT_US);
  api[OUTPUT](context, (size_t)0, dims, rank, &output);
  api[DATA](input, &from);
  api[DATA](output, &to);
  for (size_t i = 0; i < count; i++) to[i] = 2 * from[i];
}

static struct operator_ twice = {VERSION, {
  (function)create, (function)name, (function)provider, (function)type, (function)one, (function)type, (function)one,
  (function)compute, (function)destroy, (function)required, (function)required}};

void *RegisterCustomOps(void *options, struct base *runtime) {
  void *domain, *status;
  api = runtime->api_of_version(VERSION);
  if ((status = api[CREATE_DOMAIN]("test", &domain))) return status;
  if ((status = api[ADD_OPERATOR](domain, &twice))) return status;
  return api[ADD_DOMAIN](options, domain);
}
"""


def build_library(path: Path, least: int = 0, endless: int = -1, wait_us: int = 0) -> Path:
    """Compile the library to `path`, or skip the test where there is no compiler. With fewer than `least` elements, its
    operator kills the process, as integer divisions by zero do, and with `endless` of them it never ends. Before it
    computes, it waits for `wait_us`, as if on another device."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = path.with_suffix(".c")
    source.write_text(_SOURCE)
    flags = ["-shared", "-fPIC", "-w", "-std=gnu99", f"-DLEAST={least}", f"-DENDLESS={endless}", f"-DWAIT_US={wait_us}"]
    subprocess.run([compiler, *flags, "-o", str(path), str(source)], check=True)
    return path


def twice() -> onnx.ModelProto:
    """OUTPUT0 = 2 * INPUT0, FP32 [-1], computed by the library's operator."""
    made = models.model(
        [helper.make_node("Twice", ["INPUT0"], ["OUTPUT0"], domain="test")],
        [models.tensor("INPUT0", "FP32", ["batch", None])],
        [models.tensor("OUTPUT0", "FP32", ["batch", None])],
    )
    made.opset_import.append(helper.make_opsetid("test", 1))
    return made
