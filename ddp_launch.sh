#!/usr/bin/env bash
# torchrun from MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK and GPUS_PER_NODE; every other argument goes to the script.
# All bad values are collected and said in one line, so that nobody mends them one launch at a time.
set -u

here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'TEXT'
Uso: [VARIABLE=valor ...] ./ddp_launch.sh [argumentos del script]

Arranca el entrenamiento con torchrun en esta máquina. Se ejecuta una vez en cada máquina del grupo.

Variables de entorno (entre paréntesis, lo que vale si falta):
  NNODES           cuántas máquinas participan (1)
  NODE_RANK        número de esta máquina, de 0 a NNODES-1 (0; obligatoria si NNODES > 1)
  MASTER_ADDR      IP o nombre de la máquina 0 (127.0.0.1; obligatoria si NNODES > 1)
  MASTER_PORT      puerto libre de la máquina 0 (29500)
  GPUS_PER_NODE    procesos en esta máquina, uno por GPU (las GPU que haya; sin GPU, un proceso); 0: en la CPU
  SCRIPT           script que se ejecuta (train_gpt2_spanish.py)
  PYTHON           intérprete (.venv/bin/python; si no existe, python3)
  OMP_NUM_THREADS  hilos de CPU por proceso (núcleos / procesos)

Ejemplos:
  ./ddp_launch.sh --preset demo --max-steps 20
  NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.1.10 ./ddp_launch.sh --batch-size 8 --seq-len 128
  NNODES=2 NODE_RANK=1 MASTER_ADDR=192.168.1.10 ./ddp_launch.sh --batch-size 8 --seq-len 128
  SCRIPT=test_ddp.py NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.1.10 ./ddp_launch.sh

Códigos de salida: 2 si un valor no sirve; en lo demás, el de torchrun.
TEXT
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
esac

problems=()
bad() { # one problem; control characters must not break the line
    problems+=("${1//[[:cntrl:]]/?}")
}

# whole NAME VALUE LOWEST HIGHEST EXAMPLE: sets $number, or notes the problem and fails.
# Nine digits at most, as longer ones overflow silently; 10# because bash reads 08 as broken octal.
whole() {
    number=""
    if [[ ${2} =~ ^[0-9]{1,9}$ ]] && ((10#${2} >= ${3} && 10#${2} <= ${4})); then
        number=$((10#${2}))
        return 0
    fi
    bad "${1}=\"${2}\" debe ser un entero de ${3} a ${4} (por ejemplo ${1}=${5})"
    return 1
}

loopback() {
    [[ ${1} == localhost || ${1} == localhost.* || ${1} == 127.* || ${1} == ::1 || ${1} == "[::1]" ]]
}

# --- how many machines, and which one is this -----------------------------------------------------------------------
nnodes=""
whole NNODES "${NNODES:-1}" 1 4096 2 && nnodes=$number
several=$((${nnodes:-1} > 1))

node_rank=""
if [[ -z ${NODE_RANK:-} ]] && ((several)); then
    bad "falta NODE_RANK con NNODES=${nnodes} (0 en la máquina de MASTER_ADDR, 1 en la siguiente...)"
elif [[ -z ${nnodes} ]]; then
    whole NODE_RANK "${NODE_RANK:-0}" 0 4095 0 && node_rank=$number
elif whole NODE_RANK "${NODE_RANK:-0}" 0 4095 0; then
    node_rank=$number
    ((node_rank < nnodes)) || bad "NODE_RANK=${node_rank} debe ser menor que NNODES=${nnodes} (se cuenta desde 0)"
fi

# --- where they meet ------------------------------------------------------------------------------------------------
port=""
whole MASTER_PORT "${MASTER_PORT:-29500}" 1 65535 29500 && port=$number

addr=${MASTER_ADDR:-}
way_out="ponga la IP de la máquina 0 en la red, por ejemplo MASTER_ADDR=192.168.1.10"
valid_ipv4() {
    local octet
    [[ ${1} =~ ^([0-9]{1,3}\.){3}[0-9]{1,3}$ ]] || return 1
    for octet in ${1//./ }; do ((10#${octet} <= 255)) || return 1; done
}
if [[ -z ${addr} ]]; then
    if ((several)); then bad "falta MASTER_ADDR con NNODES=${nnodes} (${way_out})"; else addr=127.0.0.1; fi
elif [[ ${addr} =~ ^[^:]+:[0-9]+$ ]]; then
    bad "MASTER_ADDR=\"${addr}\" lleva un puerto (escríbalo aparte: MASTER_ADDR=${addr%:*} MASTER_PORT=${addr##*:})"
elif [[ ! ${addr} =~ ^[][A-Za-z0-9._:%-]+$ || ${addr} == -* ]]; then
    bad "MASTER_ADDR=\"${addr}\" no es una dirección (${way_out})"
elif [[ ${addr} =~ ^[0-9.]+$ ]] && ! valid_ipv4 "${addr}"; then
    bad "MASTER_ADDR=\"${addr}\" no es una dirección IPv4 (${way_out})"
elif [[ ${addr} == 0.0.0.0 || ${addr} == :: ]]; then
    bad "MASTER_ADDR=\"${addr}\" significa «todas las direcciones» y nadie puede conectarse a ella (${way_out})"
elif [[ ${addr} == *:* ]] && ! loopback "${addr}"; then
    bad "MASTER_ADDR=\"${addr}\" es una dirección IPv6, y entre máquinas se habla aquí IPv4 (${way_out})"
elif ((several)) && loopback "${addr}"; then
    bad "MASTER_ADDR=\"${addr}\" es esta misma máquina y hay NNODES=${nnodes} (${way_out})"
elif [[ ! ${addr} =~ ^[0-9.]+$ && ${addr} != *:* ]] && command -v getent >/dev/null; then
    # Debian and Ubuntu map a machine's own name to 127.0.1.1: the others would each look for the store at home.
    resolved=$(timeout 10 getent ahostsv4 "${addr}" | awk 'NR == 1 {print $1}')
    if [[ -z ${resolved} ]] && timeout 10 getent ahosts "${addr}" >/dev/null; then
        ((several)) &&
            bad "MASTER_ADDR=\"${addr}\" solo tiene aquí una dirección IPv6, y entre máquinas se habla IPv4 (${way_out})"
    elif [[ -z ${resolved} ]]; then
        bad "MASTER_ADDR=\"${addr}\" no se resuelve en esta máquina (${way_out})"
    elif ((several)) && loopback "${resolved}"; then
        bad "MASTER_ADDR=\"${addr}\" se resuelve aquí como ${resolved}, esta misma máquina (${way_out})"
    fi
fi

# --- how many processes ---------------------------------------------------------------------------------------------
gpus_here() { # what CUDA will see: the visible list if there is one, else the driver's
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        if [[ -z ${CUDA_VISIBLE_DEVICES} || ${CUDA_VISIBLE_DEVICES} == -1 ]]; then
            echo 0
        else
            awk -F, '{print NF}' <<<"${CUDA_VISIBLE_DEVICES}"
        fi
    elif command -v nvidia-smi >/dev/null; then
        timeout 30 nvidia-smi -L 2>/dev/null | grep -c '^GPU ' # prints 0 when the driver does not answer
    else
        echo 0
    fi
}
found=$(gpus_here)
processes=1
if [[ -z ${GPUS_PER_NODE:-} ]]; then
    ((found > 0)) && processes=$found
elif whole GPUS_PER_NODE "${GPUS_PER_NODE}" 0 256 1; then
    if ((number == 0)); then
        export CUDA_VISIBLE_DEVICES="" # the person said no GPU: the script must not find one
    elif ((found > 0 && number > found)); then
        way_out="use GPUS_PER_NODE=${found}, o CUDA_VISIBLE_DEVICES= para usar la CPU"
        bad "GPUS_PER_NODE=${number} y aquí hay ${found} GPU (${way_out})"
    else
        processes=$number
    fi
fi

# --- what runs ------------------------------------------------------------------------------------------------------
problem="" warning=""
python=${PYTHON:-}
prepare="prepare el entorno con «make train» o indique PYTHON=/ruta/de/python"
if [[ -z ${python} ]]; then
    if [[ -x ${here}/.venv/bin/python ]]; then python=${here}/.venv/bin/python; else python=python3; fi
fi
with_aura() { PYTHONPATH="${here}${PYTHONPATH:+:${PYTHONPATH}}" "${python}" "$@"; }
if ! command -v "${python}" >/dev/null; then
    bad "no se encuentra el intérprete PYTHON=\"${python}\" (${prepare})"
elif ! "${python}" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' >/dev/null 2>&1; then
    bad "PYTHON=\"${python}\" no tiene torch, y sin él no hay torchrun (${prepare})"
elif [[ ${node_rank} == 0 && -n ${port} ]]; then # the others come here: what is in their way is said before they do
    said=$(with_aura -c 'import sys; from aura import placement
print(placement.port_problem(int(sys.argv[1]), "MASTER_PORT=") or "")
print(placement.foreign_address(sys.argv[2], "MASTER_ADDR=", others=False) or "")' "${port}" "${addr}")
    { read -r problem && read -r warning; } <<<"${said}"
    [[ -z ${problem} ]] || bad "${problem}"
fi

# Where there is no getent, as on a Mac, Python looks the name up.
if [[ -n ${addr} && -n ${node_rank} ]] && ! command -v getent >/dev/null; then
    said=$(with_aura -c 'import sys; from aura import placement
print(placement.name_problem(sys.argv[1], sys.argv[2] == "0") or "")' "${addr}" "${node_rank}" 2>/dev/null)
    [[ -z ${said} ]] || bad "MASTER_ADDR=${said}"
fi

# Saving a large checkpoint can outlast the 30 s torchrun gives its workers after a signal.
whole TORCH_ELASTIC_SHUTDOWN_TIMEOUT "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}" 1 86400 120 &&
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${number}

script=${SCRIPT:-${here}/train_gpt2_spanish.py}
[[ -f ${script} || ! -f ${here}/${script} ]] || script=${here}/${script}
[[ -f ${script} && -r ${script} ]] ||
    bad "SCRIPT=\"${script}\" no existe o no se puede leer (indique la ruta de un script de Python)"

if ((${#problems[@]})); then
    joined=$(printf '; %s' "${problems[@]}")
    printf 'ddp_launch.sh: %s. Ayuda: ./ddp_launch.sh --help\n' "${joined:2}" >&2
    exit 2
fi

# --- go -------------------------------------------------------------------------------------------------------------
if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$(with_aura -c 'from aura import cgroup; print(cgroup.cores())' 2>/dev/null)
    [[ -n ${cores} ]] || cores=$(nproc 2>/dev/null || echo 1)
    export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
fi
[[ -z ${warning} ]] || printf 'Aviso: %s.\n' "${warning}" >&2
# torchrun would wait for the other machines in silence, or write stack traces.
if ((node_rank > 0)); then
    with_aura -m aura.waiting "${addr}" "${port}" || exit
elif ((several)); then
    printf 'Las %d máquinas empiezan juntas; se espera a las otras, todas con MASTER_ADDR=%s MASTER_PORT=%d NNODES=%d.\n' \
        "${nnodes}" "${addr}" "${port}" "${nnodes}" >&2
fi

distributed=(--distributed)
[[ ${script##*/} != test_ddp.py ]] || distributed=() # the connectivity check is always distributed and has no such flag
for argument in "$@"; do
    [[ ${argument} != --distributed ]] || distributed=()
done

signals=SIGTERM,SIGINT,SIGQUIT,SIGUSR1
# What nohup ignores would be listened to again.
[[ $(trap -p HUP) == "trap -- '' SIGHUP" ]] || signals+=,SIGHUP

# exec: the signals sent to this process reach torchrun. SIGUSR1 is not among those it forwards by itself: it would
# die of it and leave the workers behind. While it waits for the others, outside Python, it must die of Ctrl+C.
mortal="import signal as s; s.getsignal(2) == s.SIG_IGN or s.signal(2, s.SIG_DFL)"
exec "${python}" -c "${mortal}; import torch.distributed.run as torchrun; torchrun.main()" \
    --nnodes="${nnodes}" --nproc-per-node="${processes}" --node-rank="${node_rank}" \
    --rdzv-backend=static --master-addr="${addr}" --master-port="${port}" --max-restarts=0 \
    --signals-to-handle="${signals}" \
    "${script}" ${distributed[@]+"${distributed[@]}"} "$@"
