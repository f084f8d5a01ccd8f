"""The dtype that benchmarks compute in: one that this machine multiplies fast, unless one is asked for."""

import argparse
import sys

import torch

from infinity.device.machine import DTYPES, Dtype, choose_dtype


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``."""
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of the computation")


def chosen(options: argparse.Namespace) -> Dtype:
    """The dtype for ``options.dtype``; says which, on standard error."""
    dtype, line = choose_dtype(options.dtype, torch.device("cpu"), lambda ratio: ratio)
    print(line or f"dtype: {dtype}", file=sys.stderr, flush=True)
    return dtype
