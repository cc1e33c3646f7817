/* Runs the function `entry` of a library that is loaded with local scope, as interpreters load their modules.
 *
 * plugin LIBRARY [arguments] */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    int (*entry)(int, char **) = library ? (int (*)(int, char **))dlsym(library, "entry") : NULL;
    if (!entry) return fprintf(stderr, "%s\n", dlerror()), 9;
    return entry(count - 1, words + 1);
}
