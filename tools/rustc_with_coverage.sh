#!/bin/sh
# Compile a crate of this workspace as cargo-fuzz does, but without the sanitizer, which would need a nightly compiler.
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Clink-dead-code \
    -Cdebug-assertions -Coverflow-checks
