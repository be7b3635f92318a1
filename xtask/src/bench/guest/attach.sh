# Attaches and detaches each contestant ROUNDS times in turn, and notes the milliseconds of both.
# Expects ENTRANTS and ROUNDS, and lib.sh.
for ((round = 0; round <= ROUNDS; round++)); do
    for entrant in "${ENTRANTS[@]}"; do
        begin=${EPOCHREALTIME/./}
        DEVICE=
        attach "$entrant" >"$SAID" 2>&1 && [[ -e $DEVICE ]] || { absent "$entrant" attach-ms; continue; }
        middle=${EPOCHREALTIME/./}
        detach "$entrant" >"$SAID" 2>&1 || { absent "$entrant" detach-ms; continue; }
        end=${EPOCHREALTIME/./}
        # The first round loads programs into the page cache.
        ((round == 0)) && continue
        figure attach-ms "$entrant" "$(thousandth $((middle - begin)))"
        figure detach-ms "$entrant" "$(thousandth $((end - middle)))"
    done
done
