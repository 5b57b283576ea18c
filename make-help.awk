# Prints the help of a Makefile from its comments; `make help` runs it. `target` is the target to explain, or empty for
# the list of all targets. The Makefile's first lines explain the comments.

/^##@ / { heading = substr($0, 5); headings[++count] = heading; target_now = ""; next }
/^[a-z0-9-]+:/ {
    target_now = substr($0, 1, index($0, ":") - 1)
    at = index($0, "## ")
    if (at) {
        text[target_now] = substr($0, at + 3)
        targets[heading] = targets[heading] " " target_now
    }
    next
}
/^$/ { target_now = "" }
/^#\? / {
    line = substr($0, 4)
    gap = index(line, "  ")
    if (gap && match(line, /^[A-Z_]+=/)) {
        name = substr(line, 1, RLENGTH - 1)
        values[target_now, name] = substr(line, 1, gap - 1)
        meaning[target_now, name] = substr(line, gap + 2)
        line = name
    }
    variables[target_now] = variables[target_now] " " line
}

END {
    if (target == "") print_targets()
    else if (!(target in text)) {
        print "make: no target " target "; make help lists the targets" > "/dev/stderr"
        exit 2
    } else {
        printf "make %s: %s\n", target, text[target]
        print_variables(target)
    }
}

function print_targets(   number, names, total, i) {
    for (number = 1; number <= count; number++) {
        printf "%s%s:\n", (number > 1 ? "\n" : ""), headings[number]
        total = split(targets[headings[number]], names)
        for (i = 1; i <= total; i++) printf "  make %-19s %s\n", names[i], text[names[i]]
    }
    print "\nmake help TARGET=deploy-stage explains a target and its variables."
}

# A variable without an explanation at its target has one at the end of the Makefile.
function print_variables(of,   names, total, i, place) {
    total = split(variables[of], names)
    for (i = 1; i <= total; i++) {
        if (names[i] in text) {
            print_variables(names[i])
            continue
        }
        place = ((of, names[i]) in values) ? of : ""
        printf "  %s\n      %s\n", values[place, names[i]], meaning[place, names[i]]
    }
}
