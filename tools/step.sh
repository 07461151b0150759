#!/bin/sh
# Run a step of a build, and print what it does and how long it took: step.sh LABEL WHAT COMMAND...
set -u
echo "[$1] $2"
begin=$(date +%s)
label=$1
shift 2
"$@" || exit
echo "[$label] done in $(($(date +%s) - begin)) s"
