# Attaches and detaches each contestant ROUNDS times in turn, and notes the microseconds of both.
# Expects ENTRANTS, ROUNDS, and the functions section, attach and detach.
for ((round = 0; round <= ROUNDS; round++)); do
    for entrant in "${ENTRANTS[@]}"; do
        begin=${EPOCHREALTIME/./}
        attached "$entrant" || continue
        middle=${EPOCHREALTIME/./}
        detach "$entrant" >"$SAID" 2>&1 || { absent "$entrant"; continue; }
        end=${EPOCHREALTIME/./}
        # The first round loads programs into the page cache.
        ((round == 0)) || section took "$entrant" $((middle - begin)) $((end - middle))
    done
done
