#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
int main(void) {
  size_t n = (256UL << 20) / 64; 
  char *m = mmap(0, 258UL << 20, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0);
  m = (char*)(((unsigned long)m + (2UL<<20) - 1) & ~((2UL<<20)-1));
  size_t x = 1; for (size_t i = 0; i < n; i++) *(size_t*)(m + i*64) = ((i * 2654435761UL + 12345) % n);
  for (size_t i = 0; i < 1500000; i++) x = (*(size_t*)(m + x*64) + i) % n;
  printf("%zu\n", x); return 0; }
