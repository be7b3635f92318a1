# Attaches and detaches one raw image.
[[ -e ${IMAGE:=$WORK/image} ]] || truncate -s 256M "$IMAGE"
turn() { took attach-ms "$1" attach "$1" && took detach-ms "$1" detach "$1"; }
turns 0 turn
