#!/usr/bin/env bash
# Writes the completion scripts and man pages of the command line into the folders in which packages install them.
#
#     scripts/share.sh PROGRAM FOLDER
#
# PROGRAM is the command line, such as target/dist/stratalloc. FOLDER/share gets the files.
set -euo pipefail
program=$1 share=$2/share
"$program" man "$share/man/man1"
"$program" completions bash "$share/bash-completion/completions"
# bash loads the script by the name of the command.
mv "$share/bash-completion/completions/stratalloc.bash" "$share/bash-completion/completions/stratalloc"
"$program" completions zsh "$share/zsh/site-functions"
"$program" completions fish "$share/fish/vendor_completions.d"
