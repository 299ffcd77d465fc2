"""GPU backends. Everything that imports triton or flashinfer lives in this folder."""
