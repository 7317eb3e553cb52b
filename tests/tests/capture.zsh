# Prints what zsh offers for a command line: `zsh -f capture.zsh COMPLETIONS LINE DIRECTORY`, the last one empty and writable.
zmodload zsh/zpty
cat > $3/setup.zsh <<'SETUP'
PROMPT=
autoload -Uz compinit
compinit -u -D
source $COMPLETIONS
bindkey '^I' complete-word
print-end () { print -r -- 'end of completions'; exit }
comppostfuncs=(print-end)
zstyle ':completion:*' insert-tab false
compadd () {
    # With these it fills arrays and offers nothing.
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then
        builtin compadd "$@"
        return
    fi
    local -a found
    builtin compadd -A found "$@"
    for offer in $found; print -r -- "offer: $offer"
}
print -r -- ready
SETUP
export COMPLETIONS=$1
zpty z zsh -f -i
zpty -w z "source $3/setup.zsh"
while zpty -r z line; do [[ $line == ready* ]] && break; done
zpty -w -n z "$2"$'\t'
while zpty -r z line; do
    print -rn -- $line
    [[ $line == 'end of completions'* ]] && break
done
