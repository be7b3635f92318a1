# Everything here is one command away from a fresh checkout on Debian 12 with Rust.
# The targets are thin: cargo and `cargo xtask` do the work.

# A shell that make starts may not have read the profile that puts rustup's cargo in PATH.
CARGO ?= $(or $(shell command -v cargo 2>/dev/null),$(wildcard $(HOME)/.cargo/bin/cargo),$(wildcard $(CARGO_HOME)/bin/cargo))
export PATH := $(PATH):$(dir $(CARGO))
PREFIX ?= /usr/local
DESTDIR ?=
TARGET_DIR = $(or $(CARGO_TARGET_DIR),target)

.DEFAULT_GOAL := build
.PHONY: build test demo install fmt setup cargo

cargo:
	@test -n "$(CARGO)" || { echo "make: cargo is not installed; rustup or a Rust of Debian's backports brings it (1.88 or later)" >&2; exit 1; }

build: cargo  ## the optimised command, target/release/becket
	$(CARGO) build --release --locked -p becket

setup:  ## Debian packages for the tests and the demo, where they are missing
	@scripts/setup.sh

test: cargo setup  ## everything that CI checks
	@$(CARGO) xtask ci

demo: cargo setup build  ## real images, attached, compared and detached
	@BECKET="$(abspath $(TARGET_DIR))/release/becket" scripts/demo.sh

install: build  ## to $(DESTDIR)$(PREFIX)/bin
	install -D -m 755 "$(TARGET_DIR)/release/becket" "$(DESTDIR)$(PREFIX)/bin/becket"

fmt: cargo
	$(CARGO) fmt --all
