# Everything here is one command away from a fresh checkout on Debian 12 with Rust.
# The targets are thin: cargo and `cargo xtask` do the work.

# A shell that make starts may not have read the profile that puts rustup's cargo in PATH.
CARGO ?= $(or $(shell command -v cargo 2>/dev/null),$(wildcard $(HOME)/.cargo/bin/cargo),$(wildcard $(CARGO_HOME)/bin/cargo))
export PATH := $(PATH):$(dir $(CARGO))
PREFIX ?= /usr/local
DESTDIR ?=
TARGET_DIR = $(or $(CARGO_TARGET_DIR),target)

.DEFAULT_GOAL := build
.PHONY: build check test deep book demo install uninstall deb tarball sbom fmt setup cargo

cargo:
	@test -n "$(CARGO)" || { echo "make: cargo is not installed; rustup or a Rust of Debian's backports brings it (1.88 or later)" >&2; exit 1; }

# Link libc statically where the compiler has it as an archive: a start then needs no loader.
STATIC = $(if $(wildcard $(shell cc -print-file-name=libc.a)),-- -Ctarget-feature=+crt-static)
BUILT = $(TARGET_DIR)/release/becket

# The debug information is most of the file. Debuggers and backtraces find it in becket.debug, beside the
# command. A new file replaces the command: cargo's own copy below deps/ stays whole.
build: cargo  ## target/release/becket, optimised, becket.debug, its debug information, and becket-rbd
	$(CARGO) rustc --release --locked -p becket --bin becket $(STATIC)
	$(CARGO) rustc --release --locked -p becket-rbd --bin becket-rbd --features as-becket -- -Cstrip=symbols
	@objcopy --only-keep-debug "$(BUILT)" "$(BUILT).debug"
	@objcopy --strip-all --add-gnu-debuglink="$(BUILT).debug" "$(BUILT)" "$(BUILT).new"
	@mv -f "$(BUILT).new" "$(BUILT)"

setup:  ## Debian packages for the tests and the demo, where they are missing
	@scripts/setup.sh

check: cargo  ## without root and emulator: format, lints, documentation, licences, unit and property tests
	@$(CARGO) xtask ci --only fmt --only clippy --only doc --only unit

test: cargo setup  ## everything that CI checks
	@$(CARGO) xtask ci

deep: cargo setup  ## what takes hours: sanitizers, fuzzing, power cuts, corpora, all conformance modes in full, soak
	$(CARGO) xtask sanitize
	$(CARGO) xtask fuzz --minutes 10
	$(CARGO) xtask powercut
	$(MAKE) build && scripts/corpora.sh
	$(CARGO) xtask ci --whole --only conformance-host --only guest
	$(CARGO) build -p becket-rbd
	BECKET_TEST_KILLS=300 $(CARGO) test -p becket --test rbd_life -- --nocapture
	BECKET_LOSETUP_SEQUENCES=2000 $(CARGO) test -p becket --test losetup differential
	$(CARGO) xtask soak

book:  ## the guide as a book of web pages, in target/book (needs mdbook: `cargo install mdbook`)
	mdbook build -d "$(abspath $(TARGET_DIR))/book" docs/guide

demo: cargo setup build  ## real images, attached, compared and detached
	@BECKET="$(abspath $(TARGET_DIR))/release/becket" scripts/demo.sh

# BECKET=PATH installs a becket that was built before, and builds none.
BECKET = $(BUILT)
NEEDS_BUILD = $(if $(filter command environment,$(firstword $(origin BECKET))),,build)
LIB = $(DESTDIR)$(PREFIX)/lib
SHARE = $(DESTDIR)$(PREFIX)/share
# For images of Ceph: it loads librbd, so it is never static.
RBD_TO = install -D -m 755 "$(dir $(BECKET))becket-rbd" "$(DESTDIR)$(PREFIX)/libexec/becket/becket-rbd"
UNITS = becket.socket becket.service becket-attach@.service becket-metrics.socket becket-metrics.service \
	becket-storage.socket becket-storage.service

install: $(NEEDS_BUILD)  ## to $(DESTDIR)$(PREFIX): the command, man pages, completions, units, udev rules
	install -D -m 755 "$(BECKET)" "$(DESTDIR)$(PREFIX)/bin/becket"
	test ! -e "$(dir $(BECKET))becket-rbd" || $(RBD_TO)
	"$(BECKET)" man "$(SHARE)/man/man1"
	rm -f "$(SHARE)/man/man1/losetup.8"  # util-linux's name and place
	install -D -m 644 dist/beckettab.5 "$(SHARE)/man/man5/beckettab.5"
	install -d "$(SHARE)/bash-completion/completions" "$(SHARE)/zsh/site-functions" "$(SHARE)/fish/vendor_completions.d"
	"$(BECKET)" completions bash >"$(SHARE)/bash-completion/completions/becket"
	"$(BECKET)" completions zsh >"$(SHARE)/zsh/site-functions/_becket"
	"$(BECKET)" completions fish >"$(SHARE)/fish/vendor_completions.d/becket.fish"
	install -D -m 644 dist/90-becket.rules "$(LIB)/udev/rules.d/90-becket.rules"
	install -d "$(SHARE)/becket"
	sed 's|"/usr/bin/|"$(PREFIX)/bin/|' dist/91-becket-users.rules >"$(SHARE)/becket/91-becket-users.rules"
	install -m 644 -t "$(SHARE)/becket" dist/prometheus/becket.rules.yml dist/prometheus/becket-dashboard.json
	install -d "$(LIB)/systemd/system" "$(LIB)/systemd/system-generators"
	for unit in $(UNITS); do \
	    sed "s|=/usr/bin/|=$(PREFIX)/bin/|" "dist/$$unit" >"$(LIB)/systemd/system/$$unit" || exit; \
	done
	ln -sf ../../../bin/becket "$(LIB)/systemd/system-generators/becket-generator"

# Files that `install` puts in place. Directories stay, except becket's own: other packages may need them.
INSTALLED = "$(DESTDIR)$(PREFIX)/bin/becket" "$(DESTDIR)$(PREFIX)/libexec/becket/becket-rbd" \
    "$(SHARE)/man/man1/becket.1" "$(SHARE)"/man/man1/becket-*.1 "$(SHARE)/man/man5/beckettab.5" \
    "$(SHARE)/bash-completion/completions/becket" "$(SHARE)/zsh/site-functions/_becket" \
    "$(SHARE)/fish/vendor_completions.d/becket.fish" "$(LIB)/udev/rules.d/90-becket.rules" \
    "$(SHARE)/becket/91-becket-users.rules" "$(SHARE)/becket/becket.rules.yml" \
    "$(SHARE)/becket/becket-dashboard.json" $(patsubst %,"$(LIB)/systemd/system/%",$(UNITS)) \
    "$(LIB)/systemd/system-generators/becket-generator"

uninstall:  ## removes what `make install` put there, with the same PREFIX and DESTDIR
	rm -f $(INSTALLED)
	test ! -d "$(DESTDIR)$(PREFIX)/libexec/becket" || rmdir --ignore-fail-on-non-empty "$(DESTDIR)$(PREFIX)/libexec/becket"
	test ! -d "$(SHARE)/becket" || rmdir --ignore-fail-on-non-empty "$(SHARE)/becket"

# PACKAGES=DIR is where packages go.
PACKAGES ?= $(TARGET_DIR)/packages

deb: $(NEEDS_BUILD)  ## target/packages/becket_*.deb, becket-rbd_*.deb and becket-dbgsym_*.deb
	@scripts/package.sh deb "$(BECKET)" "$(PACKAGES)"

tarball: $(NEEDS_BUILD)  ## target/packages/becket-*.tar.xz: a static command and its files, below usr/
	@scripts/package.sh tarball "$(BECKET)" "$(PACKAGES)"

sbom: cargo  ## target/packages/becket.cdx.json: all code of others in the command, as CycloneDX
	@mkdir -p "$(PACKAGES)"
	@scripts/bill-of-materials.py "$$($(CARGO) pkgid -p becket | sed 's/.*[#@]//')" >"$(PACKAGES)/becket.cdx.json"
	@echo "$(PACKAGES)/becket.cdx.json"

fmt: cargo
	$(CARGO) fmt --all
